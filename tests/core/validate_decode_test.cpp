// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "core/validate.h"
#include "problems.h"

namespace mla::test {
namespace {

using Cases = std::vector<BadCase<Decode>>;

Status validate_decode(const DecodeParams& params, core::DecodeArgs& args, core::Scope scope = core::Scope::kAll) {
  Device device;
  return core::validate(params, scope, args, device);
}

TEST(ValidateDecode, RefusesWrongTypesAndShapes) {
  expect_refused(Cases{
      {"no query", [](Decode& p) { p.params.q = {}; }, "decode: q: expected q, or q_nope and q_pe, got none"},
      {"two forms of the query",
       [](Decode& p) {
         p.params.q_nope = of(p.q, {3, kHeads, kCkv});
       },
       "decode: q: expected either q or q_nope and q_pe, got both"},
      {"integer query", [](Decode& p) { p.params.q.dtype = DType::kI32; },
       "decode: q: expected bf16, f16, f32 or e4m3, got int32"},
      {"unknown element type", [](Decode& p) { p.params.q.dtype = static_cast<DType>(200); },
       "decode: q: expected bf16, f16, f32 or e4m3, got unknown element type 200"},
      {"two dimensions",
       [](Decode& p) {
         p.params.q = of(p.q, {6, kCkv + kKpe});
       },
       "decode: q: expected shape [T, H, d_qk], got [6, 12]"},
      {"too many dimensions", [](Decode& p) { p.params.q.ndim = 9; },
       "decode: q: expected shape [T, H, d_qk], got 9 dimensions"},
      {"negative extent", [](Decode& p) { set_extent(p.params.q, 0, -3); },
       "decode: q: expected shape [T, H, d_qk], got [-3, 2, 12]"},
      {"no heads",
       [](Decode& p) {
         set_extent(p.params.q, 1, 0);
         set_extent(p.params.o, 1, 0);
       },
       "decode: num_heads: expected at least 1, got 0"},
      {"o of other heads", [](Decode& p) { set_extent(p.params.o, 1, 1); },
       "decode: o: expected shape [T = 3, H = 2, kv_lora_rank], got [3, 1, 8]"},
      {"o wider than the query",
       [](Decode& p) {
         p.params.o = of(p.q, {3, kHeads, 13});
       },
       "decode: o: expected kv_lora_rank of at most d_qk = 12, got 13"},
      {"o of width 0", [](Decode& p) { set_extent(p.params.o, 2, 0); },
       "decode: kv_lora_rank: expected at least 1, got 0"},
      {"o of another type", [](Decode& p) { p.params.o.dtype = DType::kF16; },
       "decode: o: expected bf16, f32 or e4m3, got f16"},
      {"no o", [](Decode& p) { p.params.o = {}; }, "decode: o: expected a tensor, got none"},
      {"lse of another shape", [](Decode& p) { set_extent(p.params.lse, 0, 2); },
       "decode: lse: expected shape [T = 3, H = 2], got [2, 2]"},
      {"lse in bf16",
       [](Decode& p) {
         p.params.lse = of(p.lse, {3, kHeads});
       },
       "decode: lse: expected f32, got bf16"},
      {"q_pe of another type",
       [](Decode& p) {
         p.use_two_tensors();
         p.params.q_pe.dtype = DType::kF16;
       },
       "decode: q_pe: expected bf16, got f16"},
      {"q_pe of other tokens",
       [](Decode& p) {
         p.use_two_tensors();
         set_extent(p.params.q_pe, 0, 2);
       },
       "decode: q_pe: expected shape [T = 3, H = 2, qk_rope_head_dim], got [2, 2, 4]"},
      {"q_pe missing, kpe there",
       [](Decode& p) {
         p.use_two_tensors();
         p.params.q_pe = {};
       },
       "decode: cache.kpe: expected shape [num_pages = 8, page_size = 4, qk_rope_head_dim = 0], got [8, 4, 4]"},
      {"o not of q_nope's width",
       [](Decode& p) {
         p.use_two_tensors();
         set_extent(p.params.o, 2, 6);
       },
       "decode: o: expected shape [T = 3, H = 2, kv_lora_rank = 8], got [3, 2, 6]"},
  });
}

TEST(ValidateDecode, RefusesWrongCaches) {
  expect_refused(Cases{
      {"no cache", [](Decode& p) { p.params.cache = {}; },
       "decode: cache.kv: expected cache.kv, or cache.ckv and cache.kpe, got none"},
      {"both forms", [](Decode& p) { p.params.cache.ckv = p.cache.parts().ckv; },
       "decode: cache.kv: expected either cache.kv or cache.ckv and cache.kpe, got both"},
      {"unknown format", [](Decode& p) { p.params.cache.format = static_cast<CacheFormat>(77); },
       "decode: cache.format: expected a cache format, got unknown value 77"},
      {"type not of the format", [](Decode& p) { p.params.cache.format = CacheFormat::kF16; },
       "decode: cache.kv: expected f16, got bf16"},
      {"rows of another width", [](Decode& p) { set_extent(p.params.cache.kv, 2, 11); },
       "decode: cache.kv: expected shape [num_pages, page_size, d_qk = 12], got [8, 4, 11]"},
      {"kpe missing",
       [](Decode& p) {
         p.use_two_tensors();
         p.params.cache.kpe = {};
       },
       "decode: cache.kpe: expected a tensor, since qk_rope_head_dim is 4, got none"},
      {"kpe of other pages",
       [](Decode& p) {
         p.use_two_tensors();
         set_extent(p.params.cache.kpe, 0, 7);
       },
       "decode: cache.kpe: expected shape [num_pages = 8, page_size = 4, qk_rope_head_dim = 4], got [7, 4, 4]"},
      {"pages without slots", [](Decode& p) { set_extent(p.params.cache.kv, 1, 0); },
       "decode: cache.page_size: expected at least 1, got 0"},
  });
}

TEST(ValidateDecode, RefusesWhatInt32CannotCount) {
  expect_refused(Cases{
      {"rows",
       [](Decode& p) {
         for (TensorView* view : {&p.params.q, &p.params.o, &p.params.lse}) {
           *view = contiguous(view->data, view->dtype, {1 << 16, 1 << 15, 12});
           if (view == &p.params.lse) view->ndim = 2;
         }
         set_extent(p.params.o, 2, kCkv);
       },
       "decode: num_tokens: expected at most 65535 with 32768 heads, got 65536"},
      {"page size",
       [](Decode& p) {
         set_extent(p.params.cache.kv, 1, (int64_t{1} << 30) + 1);
         set_stride(p.params.cache.kv, 1, 0);
       },
       "decode: cache.page_size: expected at most 1073741824, got 1073741825"},
      {"keys of a request",
       [](Decode& p) {
         set_extent(p.params.cache.kv, 1, int64_t{1} << 30);
         set_stride(p.params.cache.kv, 1, 0);
         p.kv_len[1] = (1 << 30) + 1;
       },
       "decode: kv_len: expected at most 1073741824, got 1073741825 for request 1"},
  });
}

TEST(ValidateDecode, WidthsOfEmptyTensorsCannotOverflow) {
  const auto widths = [](int64_t ckv, int64_t kpe) {
    return [ckv, kpe](Decode& p) {
      p.params.q = {};
      p.params.q_nope = of(p.q, {0, kHeads, ckv});
      p.params.q_pe = of(p.q, {0, kHeads, kpe});
    };
  };
  expect_refused(Cases{
      {"both", widths(INT64_MAX, INT64_MAX),
       "decode: kv_lora_rank: expected at most 2147483647, got 9223372036854775807"},
      {"q_pe", widths(kCkv, INT64_MAX),
       "decode: qk_rope_head_dim: expected at most 2147483647, got 9223372036854775807"},
      {"sum",
       [widths](Decode& p) {
         widths(INT32_MAX, 1)(p);
         p.params.o = of(p.o, {0, kHeads, INT32_MAX});
       },
       "decode: d_qk: expected at most 2147483647, got 2147483648"},
  });
}

TEST(ValidateDecode, RefusesWrongStridesPointersAndDevices) {
  expect_refused(Cases{
      {"innermost stride", [](Decode& p) { set_stride(p.params.q, 2, 2); },
       "decode: q: expected stride 1 in the innermost dimension, got 2"},
      {"offsets beyond 64 bits", [](Decode& p) { set_stride(p.params.cache.kv, 0, INT64_MAX / 2); },
       "decode: cache.kv: expected offsets that fit 64 bits, got shape [8, 4, 12]"},
      {"smallest stride", [](Decode& p) { set_stride(p.params.cache.kv, 0, INT64_MIN); },
       "decode: cache.kv: expected offsets that fit 64 bits, got shape [8, 4, 12]"},
      {"output heads on top of one another", [](Decode& p) { set_stride(p.params.o, 1, 0); },
       "decode: o: expected an output whose elements do not overlap, got shape [3, 2, 8] with stride 0 in dimension 1"},
      {"output tokens on top of one another", [](Decode& p) { set_stride(p.params.o, 0, 15); },
       "decode: o: expected an output whose elements do not overlap, got shape [3, 2, 8] with stride 15 in dimension "
       "0"},
      {"lse on top of one another", [](Decode& p) { set_stride(p.params.lse, 0, -1); },
       "decode: lse: expected an output whose elements do not overlap, got shape [3, 2] with stride -1 in dimension 0"},
      {"misaligned", [](Decode& p) { p.params.q.data = reinterpret_cast<char*>(p.q.data()) + 1; },
       "decode: q: expected an address that is a multiple of 2 bytes, got one that is 1 bytes past"},
      {"mixed devices",
       [](Decode& p) {
         p.params.cache.kv.device = {DeviceType::kCuda, 1};
       },
       "decode: cache.kv: expected on cpu:0, where q is, got cuda:1"},
      {"unknown device", [](Decode& p) { p.params.o.device.type = static_cast<DeviceType>(42); },
       "decode: o: expected on cpu:0, where q is, got unknown device type 42"},
      {"null query", [](Decode& p) { p.params.q.data = nullptr; }, "decode: q: expected data, got a null pointer",
       false},
      {"null output", [](Decode& p) { p.params.o.data = nullptr; }, "decode: o: expected data, got a null pointer",
       false},
      {"null lse", [](Decode& p) { p.params.lse.data = nullptr; }, "decode: lse: expected data, got a null pointer",
       false},
      {"null cache", [](Decode& p) { p.params.cache.kv.data = nullptr; },
       "decode: cache.kv: expected data, got a null pointer", false},
      {"null page table", [](Decode& p) { p.params.pages.block_table.data = nullptr; },
       "decode: block_table: expected data, got a null pointer", false},
      {"null lengths", [](Decode& p) { p.params.pages.kv_len.data = nullptr; },
       "decode: kv_len: expected data, got a null pointer"},
  });
}

TEST(ValidateDecode, RefusesWrongScalars) {
  const auto with_scale = [](float scale) { return [scale](Decode& p) { p.params.sm_scale = scale; }; };
  expect_refused(Cases{
      {"NaN", with_scale(std::nanf("")), "decode: sm_scale: expected a finite number above 0, got nan"},
      {"infinite", with_scale(INFINITY), "decode: sm_scale: expected a finite number above 0, got inf"},
      {"zero", with_scale(0.0F), "decode: sm_scale: expected a finite number above 0, got 0"},
      {"negative", with_scale(-0.5F), "decode: sm_scale: expected a finite number above 0, got -0.5"},
      {"infinite in base 2", with_scale(3e38F),
       "decode: sm_scale: expected a number whose product with log2(e) is finite in f32, got 3e+38"},
      {"unknown base", [](Decode& p) { p.params.lse_base = static_cast<LseBase>(9); },
       "decode: lse_base: expected kE or kTwo, got 9"},
  });
}

TEST(ValidateDecode, RefusesWrongLists) {
  expect_refused(Cases{
      {"no page table", [](Decode& p) { p.params.pages.block_table = {}; },
       "decode: block_table: expected block_table, or kv_indptr and kv_indices, got none"},
      {"two page tables", [](Decode& p) { p.params.pages.kv_indptr = of(p.kv_indptr); },
       "decode: block_table: expected either block_table or kv_indptr and kv_indices, got both"},
      {"half a CSR table",
       [](Decode& p) {
         p.use_csr();
         p.params.pages.kv_indices = {};
       },
       "decode: kv_indices: expected a tensor, got none"},
      {"int64 page table", [](Decode& p) { p.params.pages.block_table.dtype = DType::kI64; },
       "decode: block_table: expected int32, got int64"},
      {"page table of another batch", [](Decode& p) { set_extent(p.params.pages.block_table, 0, 1); },
       "decode: block_table: expected shape [B = 2, max_pages], got [1, 3]"},
      {"no lengths", [](Decode& p) { p.params.pages.kv_len = {}; }, "decode: kv_len: expected a tensor, got none"},
      {"negative length", [](Decode& p) { p.kv_len[1] = -1; },
       "decode: kv_len: expected at least 0, got -1 for request 1"},
      {"length beyond the block table", [](Decode& p) { p.kv_len[1] = 13; },
       "decode: kv_len: expected at most 12 (3 pages of 4), got 13 for request 1"},
      {"length beyond the CSR row",
       [](Decode& p) {
         p.use_csr();
         p.kv_len[0] = 9;
       },
       "decode: kv_len: expected at most 8 (2 pages of 4), got 9 for request 0"},
      {"kv_indptr not from 0",
       [](Decode& p) {
         p.use_csr();
         p.kv_indptr[0] = 1;
       },
       "decode: kv_indptr: expected 0 as the first entry, got 1"},
      {"kv_indptr decreases",
       [](Decode& p) {
         p.use_csr();
         p.kv_indptr = {0, 6, 5};
       },
       "decode: kv_indptr: expected entries that never decrease, got 5 after 6 for request 1"},
      {"kv_indptr beyond kv_indices",
       [](Decode& p) {
         p.use_csr();
         p.kv_indptr[2] = 7;
       },
       "decode: kv_indptr: expected at most 6 (entries of kv_indices) as the last entry, got 7"},
      {"kv_indptr of another batch",
       [](Decode& p) {
         p.use_csr();
         set_extent(p.params.pages.kv_indptr, 0, 2);
       },
       "decode: kv_indptr: expected shape [B + 1 = 3], got [2]"},
      {"qo_indptr not from 0", [](Decode& p) { p.qo_indptr[0] = -1; },
       "decode: qo_indptr: expected 0 as the first entry, got -1"},
      {"qo_indptr decreases", [](Decode& p) { p.qo_indptr[1] = 4; },
       "decode: qo_indptr: expected entries that never decrease, got 3 after 4 for request 1"},
      {"qo_indptr not to T", [](Decode& p) { p.qo_indptr[2] = 2; },
       "decode: qo_indptr: expected exactly 3 (query tokens) as the last entry, got 2"},
      {"queries that do not divide", [](Decode& p) { p.params.qo_indptr = {}; },
       "decode: qo_indptr: expected a tensor, since 3 query tokens are not a multiple of 2 requests, got none"},
      {"page beyond the pool", [](Decode& p) { p.block_table[4] = 8; },
       "decode: block_table: expected page numbers from 0 to 7, got 8 as page 1 of request 1", false},
      {"negative page",
       [](Decode& p) {
         p.use_csr();
         p.kv_indices[4] = -2;
       },
       "decode: kv_indices: expected page numbers from 0 to 7, got -2 as page 2 of request 1", false},
  });
}

TEST(ValidateDecode, DevicesWithoutBackendAreRefused) {
  const Context context = reference_context();
  Decode problem;
  uintptr_t address = 0;  // must not be read
  for (TensorView* view :
       {&problem.params.q, &problem.params.cache.kv, &problem.params.pages.block_table, &problem.params.pages.kv_len,
        &problem.params.qo_indptr, &problem.params.o, &problem.params.lse}) {
    view->device = {DeviceType::kCuda, 0};
    view->data = reinterpret_cast<void*>(address += 4096);
  }
  const Result<size_t> size = workspace_size(context, problem.params);
  EXPECT_EQ(size.status().code(), StatusCode::kUnsupported);
  EXPECT_THAT(size.status().message(), testing::HasSubstr("reference: tensors are on cuda, not on the CPU"));
  Decode on_cpu;
  const Result<Plan> planned = plan(context, on_cpu.params, on_cpu.workspace);
  EXPECT_EQ(run(context, *planned, problem.params).message(), "decode: plan: expected one for cuda:0, got one for cpu");
}

TEST(ValidateDecode, AcceptsEveryFormAndFoldsIt) {
  Decode p;
  core::DecodeArgs whole;
  ASSERT_TRUE(validate_decode(p.params, whole).ok());
  EXPECT_EQ(whole.d_qk, 12);
  EXPECT_EQ(whole.d_v, 8);
  EXPECT_EQ(whole.q_pe, p.q.data() + 8);
  EXPECT_EQ(whole.cache.kpe.base, reinterpret_cast<std::byte*>(p.cache.data.data() + 8));
  EXPECT_EQ(whole.cache.kpe.stride_page, 96);
  EXPECT_EQ(whole.queries.len(1), 2);
  EXPECT_EQ(whole.pages.of(1), p.block_table.data() + 3);
  EXPECT_EQ(whole.pages.table_entries, 6);

  p.use_two_tensors();
  p.use_csr();
  core::DecodeArgs parts;
  ASSERT_TRUE(validate_decode(p.params, parts).ok());
  EXPECT_EQ(parts.d_qk, 12);
  EXPECT_EQ(parts.q_pe_stride_head, 4);
  EXPECT_EQ(parts.cache.kpe.base, reinterpret_cast<std::byte*>(p.cache.kpe.data()));
  EXPECT_EQ(parts.pages.of(1), p.kv_indices.data() + 2);
  EXPECT_EQ(parts.pages.table_entries, 6);
}

TEST(ValidateDecode, PageTablesEndWhereTheirMemoryDoes) {
  Decode p;
  core::DecodeArgs args;
  p.kv_len = {5, 8};
  p.params.pages.block_table = contiguous(p.block_table.data() + 1, DType::kI32, {2, 2});
  p.params.pages.block_table.stride[0] = 3;  // the last two columns of three
  ASSERT_TRUE(validate_decode(p.params, args, core::Scope::kShapesAndLengths).ok());
  EXPECT_EQ(args.pages.table_entries, 5);
  p.kv_len = {0, 0};
  p.params.pages.block_table = contiguous(nullptr, DType::kI32, {2, 0});
  p.params.pages.block_table.stride[0] = 3;
  p.params.causal = false;
  const Status status = validate_decode(p.params, args);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(args.pages.table_entries, 0);
}

TEST(ValidateDecode, AcceptsLegalOddities) {
  core::DecodeArgs args;
  {
    Decode p;  // more queries than keys, and none at all
    p.kv_len = {0, 1};
    EXPECT_EQ(validate_decode(p.params, args).message(), "");
  }
  {
    Decode p;  // a request without queries
    p.qo_indptr = {0, 3, 3};
    EXPECT_EQ(validate_decode(p.params, args).message(), "");
  }
  {
    Decode p;  // one query for all tokens and heads, lse not given, lse heads outermost
    set_stride(p.params.q, 0, 0);
    set_stride(p.params.q, 1, 0);
    p.params.lse.stride = {1, 3};
    EXPECT_EQ(validate_decode(p.params, args).message(), "");
    EXPECT_EQ(args.lse_stride_head, 3);
    p.params.lse = {};
    EXPECT_EQ(validate_decode(p.params, args).message(), "");
    EXPECT_EQ(args.lse, nullptr);
  }
  {
    Decode p;  // no rotary part
    p.params.q = {};
    p.params.q_nope = of(p.q, {3, kHeads, kCkv});
    p.params.cache = {.ckv = of(p.cache.ckv, {kPages, kPageSize, kCkv})};
    EXPECT_EQ(validate_decode(p.params, args).message(), "");
    EXPECT_EQ(args.d_qk, 8);
    EXPECT_EQ(args.q_pe, nullptr);
    EXPECT_EQ(args.cache.kpe.base, nullptr);
  }
  {
    Decode p;  // padded page stride
    p.params.cache.kv = of(p.cache.data, {4, kPageSize, kCkv + kKpe});
    set_stride(p.params.cache.kv, 0, 96);
    p.block_table = {0, 1, -1, 2, 3, 0};
    EXPECT_EQ(validate_decode(p.params, args).message(), "");
    EXPECT_EQ(args.cache.ckv.stride_page, 192);
  }
}

TEST(ValidateDecode, NothingToDoIsLegal) {
  const Context context = reference_context();
  Decode p;
  p.params.q = contiguous(nullptr, DType::kBF16, {0, kHeads, kCkv + kKpe});
  p.params.o = contiguous(nullptr, DType::kBF16, {0, kHeads, kCkv});
  p.params.lse = {};
  p.params.pages.block_table = contiguous(nullptr, DType::kI32, {0, 3});
  p.params.pages.kv_len = contiguous(nullptr, DType::kI32, {0});
  p.params.qo_indptr = {};
  EXPECT_EQ(workspace_size(context, p.params).value(), 0U);
  const Result<Plan> empty = plan(context, p.params, {});
  ASSERT_TRUE(empty.ok()) << empty.status().message();
  EXPECT_EQ(empty->num_tasks(), 0U);
  EXPECT_TRUE(run(context, *empty, p.params).ok());
}

}  // namespace
}  // namespace mla::test
