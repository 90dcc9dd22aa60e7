// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/projector.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <utility>
#include <vector>

namespace mla::cli::replay {
namespace {

using dnnl::memory;

constexpr int64_t kRowBlock = 128;  // keys and values: enough rows to pay for reading a head's weights
constexpr int64_t kRowStep = 16;    // decode: batches are rounded up to this, so that few primitives are made

memory::data_type dnnl_type(DType dtype) {
  return dtype == DType::kF32 ? memory::data_type::f32 : memory::data_type::bf16;
}

const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// Computes c [m, n] = a [m, k] . b [k, n] with strides in elements; all workers may run it at once.
class Gemm {
 public:
  struct Shape {
    int64_t m, n, k, a_stride, b_stride_k, b_stride_n, c_stride;
  };

  Gemm(const Shape& shape, DType dtype, DType out_dtype, int32_t workers) {
    const memory::desc a({shape.m, shape.k}, dnnl_type(dtype), memory::dims{shape.a_stride, 1});
    const memory::desc b({shape.k, shape.n}, dnnl_type(dtype), memory::dims{shape.b_stride_k, shape.b_stride_n});
    const memory::desc c({shape.m, shape.n}, dnnl_type(out_dtype), memory::dims{shape.c_stride, 1});
    // oneDNN's own scratch memory belongs to the thread that made the primitive, so ours goes in.
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    const dnnl::matmul::primitive_desc descriptor(dnnl::matmul::desc(a, b, c), attributes, cpu_engine());
    matmul_ = dnnl::matmul(descriptor);
    for (int32_t worker = 0; worker < workers; ++worker)
      workers_.push_back({.stream = dnnl::stream(cpu_engine()),
                          .a = memory(descriptor.src_desc(), cpu_engine(), nullptr),
                          .b = memory(descriptor.weights_desc(), cpu_engine(), nullptr),
                          .c = memory(descriptor.dst_desc(), cpu_engine(), nullptr),
                          .scratch = memory(descriptor.scratchpad_desc(), cpu_engine())});
  }

  void run(const void* a, const void* b, void* c, int32_t worker) {
    Worker& mine = workers_[static_cast<size_t>(worker)];
    mine.a.set_data_handle(const_cast<void*>(a));
    mine.b.set_data_handle(const_cast<void*>(b));
    mine.c.set_data_handle(c);
    matmul_.execute(mine.stream, {{DNNL_ARG_SRC, mine.a},
                                  {DNNL_ARG_WEIGHTS, mine.b},
                                  {DNNL_ARG_DST, mine.c},
                                  {DNNL_ARG_SCRATCHPAD, mine.scratch}});
    mine.stream.wait();
  }

 private:
  struct Worker {
    dnnl::stream stream;
    memory a, b, c, scratch;
  };
  dnnl::matmul matmul_;
  std::vector<Worker> workers_;
};

}  // namespace

struct Projector::Impl {
  Impl(const ModelConfig& config, Weights given, DType type, Team& workers)
      : heads(config.num_attention_heads),
        rank(config.kv_lora_rank),
        nope(config.qk_nope_head_dim),
        rope(config.qk_rope_head_dim),
        v_dim(config.v_head_dim),
        bytes(static_cast<int64_t>(size_of(type))),
        dtype(type),
        weights(std::move(given)),
        team(workers),
        keys({kRowBlock, nope, rank, rank + rope, 1, rank, heads * (nope + rope)}, type, type, workers.size()),
        values({kRowBlock, v_dim, rank, rank + rope, 1, rank, heads * v_dim}, type, type, workers.size()) {}

  const std::byte* w_uk(int64_t head) const { return weights.w_uk.data() + head * nope * rank * bytes; }
  const std::byte* w_uv(int64_t head) const { return weights.w_uv.data() + head * v_dim * rank * bytes; }

  // Returns the primitive for `rows` rows, which is made at first use.
  Gemm& rows_gemm(std::map<int64_t, Gemm>& made, int64_t rows, Gemm::Shape shape, DType out_dtype) const {
    const auto found = made.find(rows);
    if (found != made.end()) return found->second;
    shape.m = rows;
    return made.emplace(rows, Gemm(shape, dtype, out_dtype, team.size())).first->second;
  }

  int64_t heads, rank, nope, rope, v_dim, bytes;
  DType dtype;
  Weights weights;
  Team& team;
  Gemm keys, values;
  std::map<int64_t, Gemm> absorb_by_rows, output_by_rows;
};

DType Projector::activation_dtype() {
  try {
    const Gemm probe({kRowBlock, kRowBlock, kRowBlock, kRowBlock, 1, kRowBlock, kRowBlock}, DType::kBF16, DType::kF32,
                     1);
    return DType::kBF16;
  } catch (const dnnl::error&) {
    return DType::kF32;
  }
}

int64_t Projector::padded_rows(int64_t rows) { return (rows + kRowBlock - 1) / kRowBlock * kRowBlock; }

Projector::Projector(const ModelConfig& model, Weights weights, DType dtype, Team& team)
    : impl_(std::make_unique<Impl>(model, std::move(weights), dtype, team)) {}
Projector::~Projector() = default;

double Projector::keys_values_flops() const {
  return 2.0 * static_cast<double>(impl_->rank) * static_cast<double>(impl_->nope + impl_->v_dim);
}

void Projector::keys_values(const void* latents, int64_t rows, Heads heads, void* k, void* v) {
  Impl& p = *impl_;
  const auto* in = static_cast<const std::byte*>(latents);
  auto* keys = static_cast<std::byte*>(k);
  auto* values = static_cast<std::byte*>(v);
  const int64_t d_qk = p.nope + p.rope;
  p.team.run(padded_rows(rows) / kRowBlock, [&](int64_t block, int32_t worker) {
    const int64_t first = block * kRowBlock;
    const std::byte* block_in = in + first * (p.rank + p.rope) * p.bytes;
    for (int64_t head = heads.begin; head < heads.begin + heads.count; ++head) {
      p.keys.run(block_in, p.w_uk(head), keys + (first * p.heads + head) * d_qk * p.bytes, worker);
      p.values.run(block_in, p.w_uv(head), values + (first * p.heads + head) * p.v_dim * p.bytes, worker);
    }
    if (p.rope == 0) return;
    for (int64_t row = first; row < std::min(first + kRowBlock, rows); ++row) {
      const std::byte* kpe = in + (row * (p.rank + p.rope) + p.rank) * p.bytes;
      for (int64_t head = heads.begin; head < heads.begin + heads.count; ++head)
        std::memcpy(keys + ((row * p.heads + head) * d_qk + p.nope) * p.bytes, kpe,
                    static_cast<size_t>(p.rope * p.bytes));
    }
  });
}

void Projector::absorb(const void* q_nope, int64_t rows, void* absorbed) {
  Impl& p = *impl_;
  for (int64_t first = 0; first < rows; first += kRowBlock) {
    const int64_t block = (std::min(kRowBlock, rows - first) + kRowStep - 1) / kRowStep * kRowStep;
    Gemm& gemm = p.rows_gemm(p.absorb_by_rows, block,
                             {0, p.rank, p.nope, p.heads * p.nope, p.rank, 1, p.heads * p.rank}, p.dtype);
    const auto* in = static_cast<const std::byte*>(q_nope) + first * p.heads * p.nope * p.bytes;
    auto* out = static_cast<std::byte*>(absorbed) + first * p.heads * p.rank * p.bytes;
    p.team.run(p.heads, [&](int64_t head, int32_t worker) {
      gemm.run(in + head * p.nope * p.bytes, p.w_uk(head), out + head * p.rank * p.bytes, worker);
    });
  }
}

void Projector::output(const void* o, int64_t rows, float* out) {
  Impl& p = *impl_;
  for (int64_t first = 0; first < rows; first += kRowBlock) {
    const int64_t block = (std::min(kRowBlock, rows - first) + kRowStep - 1) / kRowStep * kRowStep;
    Gemm& gemm = p.rows_gemm(p.output_by_rows, block,
                             {0, p.v_dim, p.rank, p.heads * p.rank, 1, p.rank, p.heads * p.v_dim}, DType::kF32);
    const auto* in = static_cast<const std::byte*>(o) + first * p.heads * p.rank * p.bytes;
    float* to = out + first * p.heads * p.v_dim;
    p.team.run(p.heads, [&](int64_t head, int32_t worker) {
      gemm.run(in + head * p.rank * p.bytes, p.w_uv(head), to + head * p.v_dim, worker);
    });
  }
}

}  // namespace mla::cli::replay
