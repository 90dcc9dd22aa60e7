// SPDX-License-Identifier: Apache-2.0
// Decode context parallelism (DCP): the cache of every request is dealt out over the processes, token by token in runs
// of `interleave`, and so are the query heads. Each process
//   1. appends the tokens that it owns to a cache of its own,
//   2. gathers the queries of all heads,
//   3. decodes all heads over its own keys: partial outputs and their log-sum-exp,
//   4. sends every process the partial states of that one's heads, and merges those it gets for its own.
// Then it does the same work alone, over all keys, and compares.
//
//   mpirun -n 4 dcp_decode [interleave]
#include <mla/mla.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

namespace {

constexpr int64_t kRank = 512, kRope = 64, kRow = kRank + kRope, kPageSize = 16;
constexpr int64_t kHeadsPerProcess = 8;
// These are the lengths of the requests. The second is shorter than a run of 16, so some processes hold none of it.
const std::vector<int32_t> kKvLen = {1000, 5, 257};
const std::vector<int32_t> kQoIndptr = {0, 1, 3, 7};  // 1, 2 and 4 queries: causal limits count in global positions
constexpr int64_t kQueries = 7;
// Outputs are means of values of about 1; a wrong key shows in the first digit. Both ways round the softmax weights to
// bf16 on some processors.
constexpr double kTolerance = 0.02;

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "dcp_decode: %s\n", message.c_str());
  MPI_Abort(MPI_COMM_WORLD, 2);
  std::abort();
}

void check(const mla::Status& status) {
  if (!status.ok()) fail(status.message());
}

template <class T>
T value(mla::Result<T> result) {
  check(result.status());
  return std::move(result).value();
}

// Returns a number of about 1 that depends on the arguments alone, so that it is the same in every process.
float random_value(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15U + b + 1;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return static_cast<float>(static_cast<double>((x ^ (x >> 31)) >> 40) / double{1 << 23} - 1.0) * 1.7F;
}

std::vector<uint16_t> random_rows(uint64_t what, int64_t first, int64_t count) {
  std::vector<uint16_t> rows(static_cast<size_t>(count * kRow));
  for (int64_t i = 0; i < count * kRow; ++i)
    rows[static_cast<size_t>(i)] = mla::f32_to_bf16(random_value(what, static_cast<uint64_t>(first * kRow + i)));
  return rows;
}

// Holds a cache with the tokens that a share of the requests owns, and its page table.
struct Shard {
  std::vector<uint16_t> pool;
  std::vector<int32_t> kv_indptr = {0}, kv_indices;
  mla::KvCache cache;
  mla::PageTable pages;
};

Shard fill_shard(const mla::Context& context, const mla::ContextParallel& share) {
  Shard shard;
  std::vector<int64_t> slots;  // of all tokens of all requests; -1 where another process owns it
  for (int32_t length : kKvLen) {
    const auto first_page = static_cast<int64_t>(shard.kv_indices.size());
    int64_t local = 0;
    for (int64_t position = 0; position < length; ++position)
      slots.push_back(mla::owns(share, position) ? first_page * kPageSize + local++ : -1);
    const int64_t pages = (mla::local_length(share, length) + kPageSize - 1) / kPageSize;
    for (int64_t page = 0; page < pages; ++page)
      shard.kv_indices.push_back(static_cast<int32_t>(shard.kv_indices.size()));
    shard.kv_indptr.push_back(static_cast<int32_t>(shard.kv_indices.size()));
  }
  const auto num_pages = static_cast<int64_t>(shard.kv_indices.size()), tokens = static_cast<int64_t>(slots.size());
  shard.pool.resize(static_cast<size_t>(num_pages * kPageSize * kRow));
  shard.cache.kv = mla::contiguous(shard.pool.data(), mla::DType::kBF16, {num_pages, kPageSize, kRow});
  shard.pages.kv_indptr = mla::contiguous(shard.kv_indptr.data(), mla::DType::kI32, {std::ssize(shard.kv_indptr)});
  shard.pages.kv_indices = mla::contiguous(shard.kv_indices.data(), mla::DType::kI32, {num_pages});
  shard.pages.kv_len = mla::contiguous(kKvLen.data(), mla::DType::kI32, {std::ssize(kKvLen)});

  // A real engine computes only its own rows here; whoever owns a token writes it.
  const std::vector<uint16_t> rows = random_rows(1, 0, tokens);
  mla::AppendParams append;
  append.kv = mla::contiguous(rows.data(), mla::DType::kBF16, {tokens, kRow});
  append.slot_mapping = mla::contiguous(slots.data(), mla::DType::kI64, {tokens});
  append.cache = shard.cache;
  check(mla::run(context, append));
  return shard;
}

struct State {
  std::vector<float> o, lse;  // [kQueries, heads, kRank], [kQueries, heads]
};

State decode(const mla::Context& context, const Shard& shard, const mla::ContextParallel& share,
             const std::vector<uint16_t>& q, int64_t heads) {
  State state;
  state.o.resize(static_cast<size_t>(kQueries * heads * kRank));
  state.lse.resize(static_cast<size_t>(kQueries * heads));
  mla::DecodeParams params;
  params.q = mla::contiguous(q.data(), mla::DType::kBF16, {kQueries, heads, kRow});
  params.cache = shard.cache;
  params.pages = shard.pages;
  params.qo_indptr = mla::contiguous(kQoIndptr.data(), mla::DType::kI32, {std::ssize(kQoIndptr)});
  params.context_parallel = share;
  params.sm_scale = 1.0F / std::sqrt(128.0F + 64.0F);
  params.o = mla::contiguous(state.o.data(), mla::DType::kF32, {kQueries, heads, kRank});
  params.lse = mla::contiguous(state.lse.data(), mla::DType::kF32, {kQueries, heads});
  std::vector<std::byte> workspace(value(mla::workspace_size(context, params)));
  const mla::Plan plan = value(mla::plan(context, params, workspace));
  check(mla::run(context, plan, params));
  return state;
}

// Every process holds its own heads' queries, [kQueries, kHeadsPerProcess, kRow]; afterwards all hold those of all.
std::vector<uint16_t> gather_queries(const std::vector<uint16_t>& own, int processes) {
  std::vector<uint16_t> by_process(own.size() * static_cast<size_t>(processes)), all(by_process.size());
  const auto count = static_cast<int>(own.size());
  MPI_Allgather(own.data(), count, MPI_UINT16_T, by_process.data(), count, MPI_UINT16_T, MPI_COMM_WORLD);
  constexpr int64_t kBlock = kHeadsPerProcess * kRow;
  for (int64_t p = 0; p < processes; ++p)
    for (int64_t t = 0; t < kQueries; ++t)
      std::copy_n(by_process.begin() + (p * kQueries + t) * kBlock, kBlock, all.begin() + (t * processes + p) * kBlock);
  return all;
}

// Turns the state of all heads over this process's keys into the states of its own heads over everybody's keys,
// [processes, kQueries, kHeadsPerProcess, width]: what merge_states takes.
std::vector<float> exchange(const std::vector<float>& values, int64_t width, int processes) {
  const int64_t block = kHeadsPerProcess * width;
  std::vector<float> by_process(values.size()), received(values.size());
  for (int64_t p = 0; p < processes; ++p)
    for (int64_t t = 0; t < kQueries; ++t)
      std::copy_n(values.begin() + (t * processes + p) * block, block, by_process.begin() + (p * kQueries + t) * block);
  const auto count = static_cast<int>(kQueries * block);
  MPI_Alltoall(by_process.data(), count, MPI_FLOAT, received.data(), count, MPI_FLOAT, MPI_COMM_WORLD);
  return received;
}

State merge(const mla::Context& context, const State& states, int processes) {
  State merged;
  merged.o.resize(static_cast<size_t>(kQueries * kHeadsPerProcess * kRank));
  merged.lse.resize(static_cast<size_t>(kQueries * kHeadsPerProcess));
  mla::MergeStatesParams params;
  params.partial_o = mla::contiguous(states.o.data(), mla::DType::kF32, {processes, kQueries, kHeadsPerProcess, kRank});
  params.partial_lse = mla::contiguous(states.lse.data(), mla::DType::kF32, {processes, kQueries, kHeadsPerProcess});
  params.o = mla::contiguous(merged.o.data(), mla::DType::kF32, {kQueries, kHeadsPerProcess, kRank});
  params.lse = mla::contiguous(merged.lse.data(), mla::DType::kF32, {kQueries, kHeadsPerProcess});
  check(mla::run(context, params));
  return merged;
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    largest = std::isnan(difference) ? HUGE_VAL : std::max(largest, difference);
  }
  return largest;
}

int run(int rank, int processes, int32_t interleave) {
  const mla::Context context = value(mla::Context::create({.num_threads = 1}));
  const mla::ContextParallel share{.rank = rank, .world = processes, .interleave = interleave};
  const std::vector<uint16_t> own_q = random_rows(2, rank * kQueries * kHeadsPerProcess, kQueries * kHeadsPerProcess);

  const Shard shard = fill_shard(context, share);
  const std::vector<uint16_t> q = gather_queries(own_q, processes);
  const State partial = decode(context, shard, share, q, kHeadsPerProcess * processes);
  const State states{.o = exchange(partial.o, kRank, processes), .lse = exchange(partial.lse, 1, processes)};
  const State merged = merge(context, states, processes);

  const Shard whole = fill_shard(context, {});
  const State expected = decode(context, whole, {}, own_q, kHeadsPerProcess);
  const double own[] = {largest_difference(merged.o, expected.o), largest_difference(merged.lse, expected.lse)};
  double worst[2] = {};
  MPI_Allreduce(own, worst, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  const bool equal = worst[0] <= kTolerance && worst[1] <= kTolerance;
  if (rank == 0)
    std::printf(
        "%d processes, interleave %d, %d heads, %d requests: %s one process (largest difference %.1e in o, "
        "%.1e in lse)\n",
        processes, interleave, static_cast<int>(kHeadsPerProcess) * processes, static_cast<int>(kKvLen.size()),
        equal ? "equal to" : "DIFFERENT FROM", worst[0], worst[1]);
  return equal ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, processes = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &processes);
  const int interleave = argc > 1 ? std::atoi(argv[1]) : 1;
  int status = 2;
  if (interleave >= 1)
    status = run(rank, processes, interleave);
  else if (rank == 0)
    std::fprintf(stderr, "dcp_decode: interleave: expected 1 or more, got %s\n", argv[1]);
  MPI_Finalize();
  return status;
}
