// SPDX-License-Identifier: Apache-2.0
// Puts problems into memory that ends at a fence, and protects the unowned pages of pools.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "backend_test.h"
#include "core/fence.h"

namespace mla {

/// Makes a copy of `buffer` that ends at a fence; the view's data moves with it.
inline void fence(TensorView& view, const kit::Buffer& buffer, std::vector<std::unique_ptr<FencedMemory>>& fences) {
  if (!view.given()) return;
  const auto& memory = fences.emplace_back(std::make_unique<FencedMemory>(buffer.size()));
  ASSERT_NE(memory->data(), nullptr);
  std::memcpy(memory->data(), buffer.data(), buffer.size());
  view.data = memory->data() + (static_cast<std::byte*>(view.data) - buffer.data());
}

/// Makes every unowned page unreadable. Cache pages are whole memory pages; the pool ends at a fence, so it is aligned.
inline void protect_unowned(const TensorView& kv, const kit::TableMemory& memory) {
  const size_t bytes = static_cast<size_t>(kv.stride[0]) * size_of(kv.dtype);
  ASSERT_EQ(bytes % static_cast<size_t>(sysconf(_SC_PAGESIZE)), 0U);
  for (int32_t page : memory.unowned)
    ASSERT_EQ(mprotect(static_cast<std::byte*>(kv.data) + static_cast<size_t>(page) * bytes, bytes, PROT_NONE), 0);
}

template <class Params>
void run_params(const Context& context, const Params& params) {
  const Result<size_t> size = workspace_size(context, params);
  MLA_EXPECT_OK(size);
  FencedMemory workspace(*size);
  Result<Plan> made = plan(context, params, {workspace.data(), *size});
  MLA_EXPECT_OK(made);
  MLA_EXPECT_OK(run(context, *made, params));
}

/// Returns the number of elements to add to a page of `bytes` bytes so that pages begin at memory pages.
inline int64_t to_memory_pages(int64_t bytes, DType dtype) {
  const auto unit = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (static_cast<int64_t>(round_up(static_cast<size_t>(bytes), unit)) - bytes) /
         static_cast<int64_t>(size_of(dtype));
}

/// Returns a cache of the format whose pages begin at memory pages.
inline kit::CacheSpec fenced_cache(CacheFormat format) {
  kit::CacheSpec cache = kit::usual_cache(format);
  const DType dtype = cache.packed() ? DType::kU8 : format == CacheFormat::kFP8 ? DType::kE4M3 : DType::kBF16;
  cache.page_stride_extra = to_memory_pages(page_bytes(format, cache.d_qk, cache.page_size, false), dtype);
  cache.unowned_pages = 5;
  return cache;
}

}  // namespace mla
