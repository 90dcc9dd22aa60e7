// SPDX-License-Identifier: Apache-2.0
#include "kit/paged_memory.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "mla/numeric.h"

namespace mla::kit {
namespace {

constexpr int32_t kGarbagePage = 2147483647;
constexpr size_t kGarbageEntries = 2;
constexpr int64_t kUnevenGroup = 64;  // channels

bool quantized(CacheFormat format) { return is_quantized(kv_layout(format).nope.element); }

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

void allocate_rows(PagedMemory& memory, const CacheSpec& spec) {
  const DType dtype = dtype_of(spec.format);
  const auto make = [&](Buffer& buffer, int64_t width) {
    buffer = pages_buffer(dtype, spec, memory.num_pages, width);
    return pages_view(buffer, dtype, spec, memory.num_pages, width);
  };
  if (kv_layout(spec.format).has_footer()) {
    const int64_t bytes = page_bytes(spec.format, spec.d_qk, spec.page_size, spec.padded_pages);
    const int64_t stride = bytes + spec.page_stride_extra;
    memory.kv = Buffer(static_cast<size_t>(memory.num_pages * stride));
    memory.cache.kv = contiguous(memory.kv.data(), dtype, {memory.num_pages, bytes});
    memory.cache.kv.stride[0] = stride;
    memory.cache.page_size = spec.page_size;
  } else if (spec.packed()) {
    memory.cache.kv = make(memory.kv, row_bytes(spec.format, spec.d_qk));
  } else if (spec.two_tensors) {
    memory.cache.ckv = make(memory.ckv, spec.d_ckv());
    if (spec.d_kpe() > 0) memory.cache.kpe = make(memory.kpe, spec.d_kpe());
  } else {
    memory.cache.kv = make(memory.kv, spec.d_qk);
  }
}

void allocate_scales(PagedMemory& memory, const CacheSpec& spec) {
  const Codec codec = kv_layout(spec.format).nope;
  if (codec.outer_scale && spec.outer_scale > 0) {
    memory.ckv_scale = to_buffer(std::array{spec.outer_scale});
    memory.cache.ckv_scale = contiguous(memory.ckv_scale.data(), DType::kF32, {1});
  }
  if (codec.scale_place != ScalePlace::kTensor) return;
  if (spec.token_scales) {
    const int64_t token = kTensorScalesPerToken + spec.scale_token_extra,
                  page = spec.page_size * token + spec.scale_page_extra;
    memory.ckv_scale = Buffer(static_cast<size_t>(memory.num_pages * page) * sizeof(float));
    memory.cache.ckv_scale =
        contiguous(memory.ckv_scale.data(), DType::kF32, {memory.num_pages, spec.page_size, kTensorScalesPerToken});
    memory.cache.ckv_scale.stride[1] = token;
    memory.cache.ckv_scale.stride[0] = page;
  } else {
    memory.ckv_scale = to_buffer(std::array{spec.tensor_scale});
    memory.cache.ckv_scale = contiguous(memory.ckv_scale.data(), DType::kF32, {1});
  }
  if (spec.d_kpe() > 0 && (spec.own_kpe_scale || spec.token_scales)) {
    memory.kpe_scale = to_buffer(std::array{spec.kpe_scale});
    memory.cache.kpe_scale = contiguous(memory.kpe_scale.data(), DType::kF32, {1});
  }
}

void allocate(PagedMemory& memory, const CacheSpec& spec) {
  memory.page_size = spec.page_size;
  memory.d_ckv = spec.d_ckv();
  memory.d_kpe = spec.d_kpe();
  memory.cache.format = spec.format;
  memory.cache.power_of_two_scales = spec.power_of_two_scales;
  allocate_rows(memory, spec);
  allocate_scales(memory, spec);
  if (spec.poison)
    for (const Buffer* buffer : memory.written()) buffer->fill(kNanByte);
}

float scale_of(const TensorView& scale) { return *static_cast<const float*>(scale.data); }

/// Returns the scale of the rotary channels of the row that begins at `row`; 1 if they have none.
float kpe_scale_of(const PagedMemory& memory, const std::byte* row) {
  const KvLayout layout = kv_layout(memory.cache.format);
  if (!is_quantized(layout.rope.element) || memory.d_kpe == 0) return 1.0F;
  if (layout.rope.scale_place == ScalePlace::kTensor)
    return scale_of(memory.cache.kpe_scale.given() ? memory.cache.kpe_scale : memory.cache.ckv_scale);
  float scale = 0;
  std::memcpy(&scale, row + layout.rope_scale_offset, sizeof scale);
  return scale;
}

/// Returns what multiplies all scales of the latent channels.
float outer_scale_of(const KvCache& cache) {
  return kv_layout(cache.format).nope.outer_scale && cache.ckv_scale.given() ? scale_of(cache.ckv_scale) : 1.0F;
}

/// Returns how many scales of its own a row has.
int32_t row_scales(const PagedMemory& memory) {
  const KvLayout layout = kv_layout(memory.cache.format);
  if (layout.nope.channels_per_scale != 0) return layout.nope_dim / layout.nope.channels_per_scale;
  return memory.cache.ckv_scale.ndim == 3 ? kTensorScalesPerToken : 0;
}

float finite_amax(std::span<const float> values) {
  float amax = 0;
  for (float value : values)
    if (std::isfinite(value)) amax = std::max(amax, std::abs(value));
  return amax;
}

/// Chooses a group's scale as a writer does, and stores it. Returns what the group's values are divided by.
float make_scale(const PagedMemory& memory, std::byte* scales, int32_t group, std::span<const float> values) {
  const Codec codec = kv_layout(memory.cache.format).nope;
  const float outer = outer_scale_of(memory.cache);
  const float scale = choose_scale(codec.element, codec.scale_type, memory.cache.power_of_two_scales,
                                   finite_amax(values), outer, codec.least_scale);
  std::byte* const at = scales + int64_t{group} * size_of(codec.scale_type);
  switch (codec.scale_type) {
    case ScaleType::kUE8M0: *at = std::byte{f32_to_ue8m0(scale)}; break;
    case ScaleType::kE4M3: *at = std::byte{f32_to_e4m3(scale)}; break;
    default: std::memcpy(at, &scale, sizeof scale);
  }
  return scale * outer;
}

/// Chooses the scale of a row's rotary channels as a writer does, and stores it, if the row has one.
void make_kpe_scale(const PagedMemory& memory, std::byte* row, std::span<const float> values) {
  const KvLayout layout = kv_layout(memory.cache.format);
  if (layout.rope.scale_place != ScalePlace::kRow) return;
  const float scale = choose_scale(layout.rope.element, layout.rope.scale_type, false, finite_amax(values));
  std::fill_n(row + layout.rope_scale_offset, layout.rope_scale_bytes, std::byte{0});
  std::memcpy(row + layout.rope_scale_offset, &scale, sizeof scale);
}

float load_scale(const PagedMemory& memory, const std::byte* scales, int32_t group) {
  const ScaleType type = kv_layout(memory.cache.format).nope.scale_type;
  const std::byte* const at = scales + int64_t{group} * size_of(type);
  if (type == ScaleType::kUE8M0) return ue8m0_to_f32(std::to_integer<uint8_t>(*at));
  if (type == ScaleType::kE4M3) return e4m3_to_f32(std::to_integer<uint8_t>(*at)) * outer_scale_of(memory.cache);
  float scale = 0;
  std::memcpy(&scale, at, sizeof scale);
  return scale;
}

/// Stores channel `c` of a part whose elements are of type `element`, quantized by `scale` if that is a quantized type.
void store_channel(std::byte* part, DType element, size_t c, float value, float scale) {
  if (element == DType::kE4M3) {
    part[c] = std::byte{quantize_e4m3(value, scale)};
  } else if (element == DType::kE2M1) {
    const std::byte kept = part[c / 2] & (c % 2 == 0 ? std::byte{0xF0} : std::byte{0x0F});
    part[c / 2] = kept | std::byte{quantize_e2m1(value, scale)} << (c % 2 * 4);
  } else {
    store_element(part, element, static_cast<int64_t>(c), value);
  }
}

float load_channel(const std::byte* part, DType element, size_t c, float scale) {
  if (element == DType::kE4M3) return bf16_to_f32(dequantize_e4m3(std::to_integer<uint8_t>(part[c]), scale));
  if (element == DType::kE2M1)
    return bf16_to_f32(dequantize_e2m1(std::to_integer<uint8_t>(part[c / 2] >> (c % 2 * 4) & std::byte{0xF}), scale));
  return static_cast<float>(load_element(part, element, static_cast<int64_t>(c)));
}

/// The largest magnitude of every group becomes that of the largest e4m3 code times a power of two, which is the scale.
void shorten_scales(std::span<float> values) {
  constexpr size_t kGroup = 64;  // of all formats with larger ones, too
  constexpr float kLargestCode = 448;
  for (size_t c = 0; c + kGroup <= values.size(); c += kGroup) {
    const auto group = values.subspan(c, kGroup);
    float& largest = *std::ranges::max_element(group, {}, [](float value) { return std::abs(value); });
    largest = std::copysign(kLargestCode * std::exp2(std::ceil(std::log2(std::abs(largest) / kLargestCode))), largest);
  }
}

void fill_row(const PagedMemory& memory, const CacheSpec& spec, int64_t page, int64_t slot, uint64_t key) {
  if (quantized(spec.format) || spec.uneven_rows) {
    std::vector<float> values(static_cast<size_t>(spec.d_qk));
    fill_row_values(values, key);
    if (spec.few_long_scales && key % 11 != 0) shorten_scales(values);
    memory.write_row(page, slot, values);
    return;
  }
  const DType dtype = dtype_of(spec.format);
  const PagedMemory::Row row = memory.row(page, slot);
  fill_normal(row.ckv, dtype, 0, memory.d_ckv, mix(key, 1));
  if (memory.d_kpe > 0) fill_normal(row.kpe, dtype, 0, memory.d_kpe, mix(key, 2));
}

void place_table(TableMemory& memory, const TableSpec& spec, std::span<const int32_t> kv_len) {
  const auto batch_size = static_cast<int64_t>(kv_len.size());
  const size_t tail = spec.garbage_tail ? kGarbageEntries : 0;
  std::vector<int32_t> table;
  if (spec.block_table) {
    size_t max_pages = 0;
    for (const auto& pages : memory.pages_of) max_pages = std::max(max_pages, pages.size());
    max_pages = std::max<size_t>(max_pages + tail, 1);
    for (const auto& pages : memory.pages_of) {
      table.insert(table.end(), pages.begin(), pages.end());
      table.resize(table.size() + max_pages - pages.size() + static_cast<size_t>(spec.row_extra), kGarbagePage);
    }
    memory.table = to_buffer(table);
    memory.pages.block_table =
        contiguous(memory.table.data(), DType::kI32, {batch_size, static_cast<int64_t>(max_pages)});
    memory.pages.block_table.stride[0] += spec.row_extra;
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

TableSpec table_spec(const CacheSpec& spec, const ContextParallel& share) {
  return {.page_size = spec.page_size,
          .block_table = spec.block_table,
          .row_extra = spec.table_row_extra,
          .garbage_tail = spec.garbage_table_tail,
          .shuffled = spec.shuffled_pages,
          .unowned_pages = spec.unowned_pages,
          .shared_pages = spec.shared_pages,
          .context_parallel = share};
}

/// Returns `given` as a list of one number for each request.
std::vector<size_t> shared_pages(const std::vector<int32_t>& given, size_t requests) {
  std::vector<size_t> all(requests, given.size() == 1 ? static_cast<size_t>(given[0]) : 0);
  if (given.size() > 1) all.assign(given.begin(), given.end());
  return all;
}

}  // namespace

DType dtype_of(CacheFormat format) {
  const KvLayout layout = kv_layout(format);
  return layout.is_packed() ? DType::kU8 : layout.nope.element;
}

int64_t TableMemory::slot_of(size_t request, int64_t token) const {
  return int64_t{pages_of[request][static_cast<size_t>(token / page_size)]} * page_size + token % page_size;
}

int64_t PagedMemory::ckv_offset(int64_t page, int64_t slot) const {
  const TensorView& view = cache.kv.given() ? cache.kv : cache.ckv;
  return page * view.stride[0] + slot * view.stride[1];
}

int64_t PagedMemory::kpe_offset(int64_t page, int64_t slot) const {
  const TensorView& view = cache.kv.given() ? cache.kv : cache.kpe;
  const int64_t behind_ckv = cache.kv.given() ? d_ckv : 0;
  return page * view.stride[0] + slot * view.stride[1] + behind_ckv;
}

PagedMemory::Row PagedMemory::row(int64_t page, int64_t slot) const {
  const KvLayout layout = kv_layout(cache.format);
  if (layout.has_footer()) {
    std::byte* const at = kv.data() + page * cache.kv.stride[0];
    std::byte* const base = at + slot * layout.row_bytes;
    return {.ckv = base, .kpe = base + layout.rope_offset, .scales = at + footer_scale_offset(layout, page_size, slot)};
  }
  if (layout.is_packed()) {
    std::byte* const base = kv.data() + ckv_offset(page, slot);
    return {.ckv = base, .kpe = base + layout.rope_offset, .scales = base + layout.scale_offset};
  }
  const auto element = static_cast<int64_t>(size_of(layout.nope.element));
  Row row = {.ckv = (cache.kv.given() ? kv : ckv).data() + ckv_offset(page, slot) * element,
             .kpe = nullptr,
             .scales = nullptr};
  if (d_kpe > 0) row.kpe = (cache.kv.given() ? kv : kpe).data() + kpe_offset(page, slot) * element;
  if (cache.ckv_scale.ndim == 3)
    row.scales = ckv_scale.data() + (page * cache.ckv_scale.stride[0] + slot * cache.ckv_scale.stride[1]) *
                                        static_cast<int64_t>(sizeof(float));
  return row;
}

void PagedMemory::write_row(int64_t page, int64_t slot, std::span<const float> values) const {
  const Row to = row(page, slot);
  const auto latent = values.first(static_cast<size_t>(d_ckv)), rope = values.subspan(static_cast<size_t>(d_ckv));
  const KvLayout layout = kv_layout(cache.format);
  make_kpe_scale(*this, to.ckv, rope);
  const float rope_scale = kpe_scale_of(*this, to.ckv);
  for (size_t c = 0; c < rope.size(); ++c) store_channel(to.kpe, layout.rope.element, c, rope[c], rope_scale);
  const int32_t scales = row_scales(*this);
  const size_t width = scales == 0 ? latent.size() : latent.size() / static_cast<size_t>(scales);
  for (size_t first = 0; first < latent.size(); first += width) {
    const auto group = latent.subspan(first, width);
    float scale = 1.0F;
    if (scales > 0)
      scale = make_scale(*this, to.scales, static_cast<int32_t>(first / width), group);
    else if (quantized(cache.format))
      scale = scale_of(cache.ckv_scale);
    for (size_t i = 0; i < width; ++i) store_channel(to.ckv, layout.nope.element, first + i, group[i], scale);
  }
  if (layout.is_packed() && scales > 0)
    std::fill(to.scales + scales * size_of(layout.nope.scale_type), to.scales + layout.scale_bytes_per_token,
              std::byte{0});
}

std::vector<float> PagedMemory::read_row(int64_t page, int64_t slot) const {
  const Row from = row(page, slot);
  const KvLayout layout = kv_layout(cache.format);
  std::vector<float> values;
  const int32_t scales = row_scales(*this);
  for (int32_t c = 0; c < d_ckv; ++c) {
    const float scale = scales > 0                ? load_scale(*this, from.scales, c / (d_ckv / scales))
                        : quantized(cache.format) ? scale_of(cache.ckv_scale)
                                                  : 1.0F;
    values.push_back(load_channel(from.ckv, layout.nope.element, static_cast<size_t>(c), scale));
  }
  const float rope_scale = kpe_scale_of(*this, from.ckv);
  for (int32_t c = 0; c < d_kpe; ++c)
    values.push_back(load_channel(from.kpe, layout.rope.element, static_cast<size_t>(c), rope_scale));
  return values;
}

std::vector<const Buffer*> PagedMemory::written() const {
  std::vector<const Buffer*> buffers = {&kv, &ckv, &kpe};
  if (cache.ckv_scale.ndim == 3) buffers.push_back(&ckv_scale);
  return buffers;
}

TableMemory make_table(const TableSpec& spec, std::span<const int32_t> kv_len, uint64_t seed) {
  TableMemory memory;
  memory.page_size = spec.page_size;
  std::vector<size_t> needed, shared = shared_pages(spec.shared_pages, kv_len.size());
  memory.num_pages = spec.unowned_pages;
  for (size_t b = 0; b < kv_len.size(); ++b) {
    const int64_t local = local_length(spec.context_parallel, kv_len[b]);
    needed.push_back(static_cast<size_t>((local + spec.page_size - 1) / spec.page_size));
    shared[b] = b > 0 ? std::min({shared[b], needed[b - 1], needed[b]}) : 0;
    memory.num_pages += static_cast<int64_t>(needed[b] - shared[b]);
  }

  std::vector<int32_t> order(static_cast<size_t>(memory.num_pages));
  std::iota(order.begin(), order.end(), 0);
  if (spec.shuffled) {
    Random random(mix(seed, 0x9A6E));
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
  }
  auto next = order.begin();
  for (size_t b = 0; b < kv_len.size(); ++b) {
    std::vector<int32_t> pages;
    if (b > 0) pages.assign(memory.pages_of[b - 1].begin(), memory.pages_of[b - 1].begin() + std::ptrdiff_t(shared[b]));
    const auto end = next + static_cast<std::ptrdiff_t>(needed[b] - shared[b]);
    pages.insert(pages.end(), next, end);
    memory.pages_of.push_back(std::move(pages));
    next = end;
  }
  memory.unowned.assign(next, order.end());
  place_table(memory, spec, kv_len);
  return memory;
}

void fill_row_values(std::span<float> values, uint64_t key) {
  constexpr std::array<float, 4> kMagnitudes = {0.1F, 0.5F, 1.0F, 1.6F};  // mean square about 1
  for (int64_t c = 0; c < std::ssize(values); c += kUnevenGroup) {
    const uint64_t group = mix(key, static_cast<uint64_t>(c));
    fill_normal(values.data(), DType::kF32, c, std::min(kUnevenGroup, std::ssize(values) - c), group,
                kMagnitudes[group % kMagnitudes.size()]);
  }
}

PagedMemory make_paged(const CacheSpec& spec, std::span<const int32_t> kv_len, uint64_t seed,
                       const ContextParallel& context_parallel) {
  PagedMemory memory;
  static_cast<TableMemory&>(memory) = make_table(table_spec(spec, context_parallel), kv_len, seed);
  allocate(memory, spec);
  for (size_t request = 0; request < kv_len.size(); ++request) {
    const int64_t tokens = local_length(context_parallel, kv_len[request]);
    for (int64_t token = 0; token < tokens; ++token) {
      const auto position = static_cast<uint64_t>(global_position(context_parallel, token));
      fill_row(memory, spec, memory.pages_of[request][static_cast<size_t>(token / spec.page_size)],
               token % spec.page_size, mix(seed, request, position));
    }
  }
  return memory;
}

PagedMemory make_pool(const CacheSpec& spec, int64_t num_pages) {
  PagedMemory memory;
  memory.num_pages = num_pages;
  allocate(memory, spec);
  return memory;
}

std::byte* IndexerMemory::key(int64_t page, int64_t slot) const {
  return kv.data() + page * cache.kv.stride[0] + slot * indexer_layout(cache.format).key_bytes;
}

std::byte* IndexerMemory::scale(int64_t page, int64_t slot) const {
  return key(page, cache.page_size) + slot * indexer_layout(cache.format).scale_bytes;
}

std::vector<double> IndexerMemory::values(int64_t page, int64_t slot) const {
  const IndexerLayout layout = indexer_layout(cache.format);
  std::vector<double> values(static_cast<size_t>(layout.head_dim));
  for (int32_t c = 0; c < layout.head_dim; ++c) {
    const int32_t group = c / layout.codec.channels_per_scale;
    float factor = 0;
    if (layout.codec.scale_type == ScaleType::kUE8M0)
      factor = ue8m0_to_f32(std::to_integer<uint8_t>(scale(page, slot)[group]));
    else
      std::memcpy(&factor, scale(page, slot) + group * int64_t{sizeof factor}, sizeof factor);
    const auto pair = std::to_integer<uint32_t>(key(page, slot)[c / 2]);
    const float element = layout.codec.element == DType::kE2M1
                              ? e2m1_to_f32(static_cast<uint8_t>(pair >> (c % 2 * 4) & 0xFU))
                              : e4m3_to_f32(std::to_integer<uint8_t>(key(page, slot)[c]));
    values[static_cast<size_t>(c)] = static_cast<double>(element) * static_cast<double>(factor);
  }
  return values;
}

IndexerMemory make_indexer_pool(IndexerFormat format, int32_t page_size, int64_t num_pages, int64_t page_stride_extra,
                                bool poison) {
  IndexerMemory memory;
  const int64_t bytes = indexer_page_bytes(page_size, format), stride = bytes + page_stride_extra;
  memory.kv = Buffer(static_cast<size_t>(num_pages * stride));
  if (poison) memory.kv.fill(kNanByte);
  memory.cache.kv = contiguous(memory.kv.data(), DType::kU8, {num_pages, bytes});
  memory.cache.kv.stride[0] = stride;
  memory.cache.page_size = page_size;
  memory.cache.format = format;
  return memory;
}

void write_indexer_key(const IndexerMemory& memory, int64_t page, int64_t slot, std::span<const float> key) {
  const IndexerLayout layout = indexer_layout(memory.cache.format);
  const auto group = static_cast<size_t>(layout.codec.channels_per_scale);
  std::byte* const to = memory.key(page, slot);
  for (size_t first = 0; first < key.size(); first += group) {
    float amax = 0;
    for (float value : key.subspan(first, group)) amax = std::max(amax, std::abs(value));
    const float scale = choose_scale(layout.codec.element, layout.codec.scale_type, true, amax);
    if (layout.codec.scale_type == ScaleType::kUE8M0)
      memory.scale(page, slot)[first / group] = std::byte{f32_to_ue8m0(scale)};
    else
      std::memcpy(memory.scale(page, slot), &scale, sizeof scale);
    for (size_t c = first; c < first + group; c += 2) {
      if (layout.codec.element == DType::kE2M1) {
        to[c / 2] = std::byte{quantize_e2m1(key[c], scale)} | std::byte{quantize_e2m1(key[c + 1], scale)} << 4;
      } else {
        to[c] = std::byte{quantize_e4m3(key[c], scale)};
        to[c + 1] = std::byte{quantize_e4m3(key[c + 1], scale)};
      }
    }
  }
}

Buffer make_slot_mapping(int64_t num_tokens, int64_t num_slots, double skip_share, uint64_t seed) {
  Random random(seed);
  std::vector<int64_t> slots(static_cast<size_t>(num_slots));
  std::iota(slots.begin(), slots.end(), 0);
  for (int64_t i = 0; i < num_tokens; ++i) {
    auto& slot = slots[static_cast<size_t>(i)];
    std::swap(slot, slots[static_cast<size_t>(random.integer(i, num_slots - 1))]);
    if (random.chance(skip_share)) slot = -random.integer(1, 3);
  }
  slots.resize(static_cast<size_t>(num_tokens));
  return to_buffer(slots);
}

}  // namespace mla::kit
