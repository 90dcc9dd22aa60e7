// SPDX-License-Identifier: Apache-2.0
#include "kit/paged_memory.h"

#include <algorithm>
#include <numeric>

namespace mla::kit {
namespace {

constexpr int32_t kGarbagePage = 2147483647;
constexpr int32_t kGarbageEntries = 2;

TensorView pages_view(const Buffer& buffer, DType dtype, const CacheSpec& spec, int64_t num_pages, int64_t width) {
  TensorView view = contiguous(buffer.data(), dtype, {num_pages, spec.page_size, width});
  view.stride[1] = width + spec.token_stride_extra;
  view.stride[0] = spec.page_size * view.stride[1] + spec.page_stride_extra;
  return view;
}

Buffer pages_buffer(DType dtype, const CacheSpec& spec, int64_t num_pages, int64_t width) {
  const int64_t page = spec.page_size * (width + spec.token_stride_extra) + spec.page_stride_extra;
  return Buffer(static_cast<size_t>(num_pages * page) * size_of(dtype));
}

void allocate(PagedMemory& memory, const CacheSpec& spec, int64_t num_pages) {
  const DType dtype = dtype_of(spec.format);
  memory.cache.format = spec.format;
  if (spec.two_tensors) {
    memory.ckv = pages_buffer(dtype, spec, num_pages, spec.d_v);
    memory.cache.ckv = pages_view(memory.ckv, dtype, spec, num_pages, spec.d_v);
    if (spec.d_qk > spec.d_v) {
      memory.kpe = pages_buffer(dtype, spec, num_pages, spec.d_qk - spec.d_v);
      memory.cache.kpe = pages_view(memory.kpe, dtype, spec, num_pages, spec.d_qk - spec.d_v);
    }
  } else {
    memory.kv = pages_buffer(dtype, spec, num_pages, spec.d_qk);
    memory.cache.kv = pages_view(memory.kv, dtype, spec, num_pages, spec.d_qk);
  }
  if (spec.poison)
    for (const Buffer* buffer : {&memory.kv, &memory.ckv, &memory.kpe}) buffer->fill(kNanByte);
}

void fill_row(PagedMemory& memory, const CacheSpec& spec, int64_t page, int64_t slot, uint64_t key) {
  const DType dtype = dtype_of(spec.format);
  const int64_t d_kpe = spec.d_qk - spec.d_v;
  Buffer& ckv = spec.two_tensors ? memory.ckv : memory.kv;
  Buffer& kpe = spec.two_tensors ? memory.kpe : memory.kv;
  fill_normal(ckv.data(), dtype, memory.ckv_offset(page, slot), spec.d_v, mix(key, 1));
  if (d_kpe > 0) fill_normal(kpe.data(), dtype, memory.kpe_offset(page, slot), d_kpe, mix(key, 2));
}

void make_table(PagedMemory& memory, const CacheSpec& spec, std::span<const int32_t> kv_len) {
  const auto batch_size = static_cast<int64_t>(kv_len.size());
  const size_t tail = spec.garbage_table_tail ? kGarbageEntries : 0;
  std::vector<int32_t> table;
  if (spec.block_table) {
    size_t max_pages = 0;
    for (const auto& pages : memory.pages_of) max_pages = std::max(max_pages, pages.size());
    max_pages = std::max<size_t>(max_pages + tail, 1);
    for (const auto& pages : memory.pages_of) {
      table.insert(table.end(), pages.begin(), pages.end());
      table.resize(table.size() + max_pages - pages.size(), kGarbagePage);
    }
    memory.table = to_buffer(table);
    memory.pages.block_table =
        contiguous(memory.table.data(), DType::kI32, {batch_size, static_cast<int64_t>(max_pages)});
  } else {
    std::vector<int32_t> indptr = {0};
    for (const auto& pages : memory.pages_of) {
      table.insert(table.end(), pages.begin(), pages.end());
      table.resize(table.size() + tail, kGarbagePage);
      indptr.push_back(static_cast<int32_t>(table.size()));
    }
    memory.table = to_buffer(table);
    memory.kv_indptr = to_buffer(indptr);
    memory.pages.kv_indices = contiguous(memory.table.data(), DType::kI32, {static_cast<int64_t>(table.size())});
    memory.pages.kv_indptr = contiguous(memory.kv_indptr.data(), DType::kI32, {batch_size + 1});
  }
  memory.kv_len = to_buffer(kv_len);
  memory.pages.kv_len = contiguous(memory.kv_len.data(), DType::kI32, {batch_size});
}

}  // namespace

DType dtype_of(CacheFormat format) { return format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16; }

int64_t PagedMemory::ckv_offset(int64_t page, int64_t slot) const {
  const TensorView& view = cache.kv.given() ? cache.kv : cache.ckv;
  return page * view.stride[0] + slot * view.stride[1];
}

int64_t PagedMemory::kpe_offset(int64_t page, int64_t slot) const {
  const TensorView& view = cache.kv.given() ? cache.kv : cache.kpe;
  const int64_t behind_ckv = cache.kv.given() ? d_ckv : 0;
  return page * view.stride[0] + slot * view.stride[1] + behind_ckv;
}

PagedMemory make_paged(const CacheSpec& spec, std::span<const int32_t> kv_len, uint64_t seed) {
  PagedMemory memory;
  memory.d_ckv = spec.d_v;
  int64_t num_pages = spec.unowned_pages;
  for (int32_t len : kv_len) num_pages += (len + spec.page_size - 1) / spec.page_size;
  allocate(memory, spec, num_pages);

  std::vector<int32_t> order(static_cast<size_t>(num_pages));
  std::iota(order.begin(), order.end(), 0);
  if (spec.shuffled_pages) {
    Random random(mix(seed, 0x9A6E));
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
  }

  size_t next = 0;
  for (size_t request = 0; request < kv_len.size(); ++request) {
    const int32_t len = kv_len[request];
    const auto needed = static_cast<size_t>((len + spec.page_size - 1) / spec.page_size);
    auto& pages = memory.pages_of.emplace_back(order.begin() + static_cast<std::ptrdiff_t>(next),
                                               order.begin() + static_cast<std::ptrdiff_t>(next + needed));
    next += needed;
    for (int32_t token = 0; token < len; ++token)
      fill_row(memory, spec, pages[static_cast<size_t>(token / spec.page_size)], token % spec.page_size,
               mix(seed, request, static_cast<uint64_t>(token)));
  }
  memory.unowned.assign(order.begin() + static_cast<std::ptrdiff_t>(next), order.end());
  make_table(memory, spec, kv_len);
  return memory;
}

PagedMemory make_pool(const CacheSpec& spec, int64_t num_pages) {
  PagedMemory memory;
  memory.d_ckv = spec.d_v;
  allocate(memory, spec, num_pages);
  return memory;
}

}  // namespace mla::kit
