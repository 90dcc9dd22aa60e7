// SPDX-License-Identifier: Apache-2.0
// This program computes one decode step of one request: it appends its tokens to a paged cache and attends over them.
#include <mla/mla.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace {

// DeepSeek-V2-Lite: 16 heads, latent rows of 512 + 64 channels.
constexpr int64_t kHeads = 16, kRank = 512, kRope = 64, kRow = kRank + kRope;
constexpr int64_t kPages = 4, kPageSize = 64, kTokens = 100;

mla::Status decode_step() {
  const mla::Result<mla::Context> context = mla::Context::create();  // all processors, the best backend
  if (!context.ok()) return context.status();

  // The caller owns every buffer; a view says what it holds.
  std::vector<uint16_t> pool(kPages * kPageSize * kRow);
  mla::KvCache cache;
  cache.kv = mla::contiguous(pool.data(), mla::DType::kBF16, {kPages, kPageSize, kRow});

  // The request's 100 tokens lie in page 2, then in page 0. All hold 0.5, so attention over them must give 0.5.
  const std::vector<int32_t> block_table = {2, 0};
  const std::vector<int32_t> kv_len = {kTokens};
  const std::vector<uint16_t> rows(kTokens * kRow, mla::f32_to_bf16(0.5F));
  std::vector<int64_t> slots(kTokens);
  for (int64_t t = 0; t < kTokens; ++t) slots[t] = block_table[t / kPageSize] * kPageSize + t % kPageSize;

  mla::AppendParams append;
  append.kv = mla::contiguous(rows.data(), mla::DType::kBF16, {kTokens, kRow});
  append.slot_mapping = mla::contiguous(slots.data(), mla::DType::kI64, {kTokens});
  append.cache = cache;
  if (mla::Status status = mla::run(*context, append); !status.ok()) return status;

  // One query token, already absorbed: [T, H, d_qk] in, [T, H, d_v] and the log-sum-exp out.
  const std::vector<uint16_t> q(kHeads * kRow, mla::f32_to_bf16(0.125F));
  std::vector<float> o(kHeads * kRank), lse(kHeads);
  mla::DecodeParams decode;
  decode.q = mla::contiguous(q.data(), mla::DType::kBF16, {1, kHeads, kRow});
  decode.cache = cache;
  decode.pages.block_table = mla::contiguous(block_table.data(), mla::DType::kI32, {1, 2});
  decode.pages.kv_len = mla::contiguous(kv_len.data(), mla::DType::kI32, {1});
  decode.sm_scale = 1.0F / std::sqrt(128.0F + 64.0F);
  decode.o = mla::contiguous(o.data(), mla::DType::kF32, {1, kHeads, kRank});
  decode.lse = mla::contiguous(lse.data(), mla::DType::kF32, {1, kHeads});

  // Plan once per batch shape, run once per layer.
  const mla::Result<size_t> bytes = mla::workspace_size(*context, decode);
  if (!bytes.ok()) return bytes.status();
  std::vector<std::byte> workspace(*bytes);
  const mla::Result<mla::Plan> plan = mla::plan(*context, decode, workspace);
  if (!plan.ok()) return plan.status();
  if (mla::Status status = mla::run(*context, *plan, decode); !status.ok()) return status;

  std::printf("backend %s: o = %.3f, lse = %.3f\n", std::string(plan->backend()).c_str(), o[0], lse[0]);
  return {};
}

}  // namespace

int main() {
  const mla::Status status = decode_step();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.ok() ? 0 : 1;
}
