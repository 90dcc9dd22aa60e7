// SPDX-License-Identifier: Apache-2.0
// Tests row operations on caches, of every instruction set this machine has, against the reference: the same bytes,
// gaps included, and the same indices.
#include "row_operations.h"

namespace mla::cpu {
namespace {

/// Describes a form of cache; widths 0 are the format's own.
struct Form {
  const char* name;
  CacheFormat format;
  int32_t d_ckv, d_kpe;
  int32_t num_scales = 0;
  bool power_of_two = true;
  bool outer = false;  // has an outer scale
};

constexpr Form kForms[] = {
    {"bf16", CacheFormat::kBF16, 512, 64},
    {"bf16_odd", CacheFormat::kBF16, 37, 6},
    {"bf16_nope", CacheFormat::kBF16, 320, 0},
    {"f16", CacheFormat::kF16, 512, 64},
    {"fp8", CacheFormat::kFP8, 512, 64, 1},
    {"fp8_odd", CacheFormat::kFP8, 37, 6, 1},
    {"fp8_quarters", CacheFormat::kFP8, 512, 64, 4},
    {"fp8_odd_quarters", CacheFormat::kFP8, 52, 6, 4, false},
    {"fp8_ds_mla", CacheFormat::kFP8DsMla, 512, 64, 4},
    {"fp8_ds_mla_any_scale", CacheFormat::kFP8DsMla, 512, 64, 4, false},
    {"fp8_dsv4", CacheFormat::kFP8DsV4, 448, 64, 7},
    {"fp8_dsv41", CacheFormat::kFP8DsV41, 512, 0, 16},
    {"fp4_dsv41", CacheFormat::kFP4DsV41, 512, 0, 32},
    {"fp8_nope", CacheFormat::kFP8Nope, 512, 0, 4},
    {"fp8_nope_any_scale", CacheFormat::kFP8Nope, 512, 0, 4, false},
    {"nvfp4_ds_mla", CacheFormat::kNvFP4DsMla, 512, 64, 32},
    {"nvfp4_ds_mla_416_outer", CacheFormat::kNvFP4DsMla416, 512, 64, 32, true, true},
    {"nvfp4_ds_mla_368", CacheFormat::kNvFP4DsMla368, 512, 64, 32},
    {"nvfp4_ds_mla_368_outer", CacheFormat::kNvFP4DsMla368, 512, 64, 32, true, true},
    {"nvfp4_dsv4", CacheFormat::kNvFP4DsV4, 448, 64, 28},
    {"mxfp4_dsv4", CacheFormat::kMxFP4DsV4, 448, 64, 14},
};

/// Holds a cache of its own, every byte of it set.
class TestCache {
 public:
  TestCache(const Form& form, int64_t num_pages, int32_t page_size, float scale = 0.37F) : scales_{scale, 0.11F} {
    const KvLayout layout = kv_layout(form.format);
    const int64_t d_qk = form.d_ckv + form.d_kpe;
    const int64_t row = row_bytes(form.format, d_qk) + (layout.is_packed() ? 0 : 6);  // a gap, and no alignment
    const bool footer = layout.has_footer();
    const int64_t page = (footer ? page_bytes(form.format, d_qk, page_size, true) : page_size * row) + 64;
    bytes_.assign(static_cast<size_t>(num_pages * page), std::byte{0xA5});
    quarters_.assign(static_cast<size_t>(num_pages * page_size * 4), 0.25F);
    cache_ = {.format = form.format,
              .num_pages = num_pages,
              .page_size = page_size,
              .d_ckv = form.d_ckv,
              .d_kpe = form.d_kpe,
              .ckv = {bytes_.data(), page, row},
              .power_of_two_scales = form.power_of_two};
    core::set_codecs(layout, cache_);
    if (layout.is_packed()) core::set_planes(layout, bytes_.data(), page, row, cache_);
    if (form.outer) cache_.outer_scale = scales_;
    if (!layout.is_packed() && form.d_kpe > 0) cache_.kpe = {bytes_.data() + cache_.ckv_bytes(), page, row};
    if (layout.nope.scale_place == ScalePlace::kTensor) {
      if (form.num_scales > 1) core::set_token_scales(cache_);
      cache_.kpe_scale = scales_ + 1;
      if (form.num_scales == 1)
        cache_.scales = {reinterpret_cast<std::byte*>(scales_), 0, 0};
      else
        cache_.scales = {reinterpret_cast<std::byte*>(quarters_.data()), page_size * 16, 16};
    }
  }
  TestCache(const TestCache&) = delete;
  TestCache& operator=(const TestCache&) = delete;

  const core::Cache& get() const { return cache_; }
  friend bool operator==(const TestCache& a, const TestCache& b) {
    return a.bytes_ == b.bytes_ && a.quarters_ == b.quarters_;
  }

 private:
  float scales_[2];
  std::vector<std::byte> bytes_;
  std::vector<float> quarters_;
  core::Cache cache_;
};

TEST_P(RowOperationsTest, AppendWritesTheBytesOfTheReference) {
  for (const Form& form : kForms)
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
      for (bool special : {false, true}) {
        TestCache expected(form, 5, 16), actual(form, 5, 16);
        const std::vector<int64_t> slots = random_slots(80);
        const auto rows = random_rows(80 * (form.d_ckv + form.d_kpe), dtype, special);
        core::AppendArgs args = {.num_tokens = 80,
                                 .dtype = dtype,
                                 .ckv = rows.data(),
                                 .ckv_stride_token = form.d_ckv + form.d_kpe,
                                 .kpe = rows.data() + static_cast<size_t>(form.d_ckv) * size_of(dtype),
                                 .kpe_stride_token = form.d_ckv + form.d_kpe,
                                 .slot_mapping = slots.data(),
                                 .cache = expected.get()};
        reference::append(args);
        args.cache = actual.get();
        run_append(set_, args, pool_);
        EXPECT_TRUE(expected == actual) << form.name << " from " << name(dtype) << " special " << special;
      }
}

/// Fills a cache with random rows by the reference.
void fill(const core::Cache& cache, const std::vector<std::byte>& rows, DType dtype) {
  std::vector<int64_t> slots(static_cast<size_t>(cache.num_slots()));
  std::iota(slots.begin(), slots.end(), 0);
  const int64_t width = cache.d_ckv + cache.d_kpe;
  reference::append({.num_tokens = cache.num_slots(),
                     .dtype = dtype,
                     .ckv = rows.data(),
                     .ckv_stride_token = width,
                     .kpe = rows.data() + static_cast<size_t>(cache.d_ckv) * size_of(dtype),
                     .kpe_stride_token = width,
                     .slot_mapping = slots.data(),
                     .cache = cache});
}

TEST_P(RowOperationsTest, GatherDequantizesAsTheReference) {
  for (const Form& form : kForms)
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      TestCache cache(form, 6, 16);
      fill(cache.get(), random_rows(96 * (form.d_ckv + form.d_kpe), DType::kF32, false), DType::kF32);
      const std::vector<int32_t> table = {4, 2, 0, 5, 1, 3}, kv_indptr = {0, 3, 3, 6}, kv_len = {40, 0, 48};
      const std::vector<int32_t> start = {3, 0, 1}, out_indptr = {0, 30, 30, 77};
      const int64_t width = form.d_ckv + form.d_kpe + 3;
      std::vector<std::byte> expected(static_cast<size_t>(77 * width) * size_of(dtype), std::byte{0x5A});
      std::vector<std::byte> actual = expected;
      core::GatherArgs args = {.batch_size = 3,
                               .num_rows = 77,
                               .cache = cache.get(),
                               .pages = {.page_size = 16,
                                         .batch_size = 3,
                                         .table = table.data(),
                                         .kv_indptr = kv_indptr.data(),
                                         .kv_len = kv_len.data()},
                               .token_start = start.data(),
                               .out_indptr = out_indptr.data(),
                               .out_dtype = dtype,
                               .out_ckv_stride_token = width,
                               .out_kpe_stride_token = width};
      const auto run = [&](std::vector<std::byte>& out, const auto& gather) {
        args.out_ckv = out.data();
        args.out_kpe = out.data() + static_cast<size_t>(form.d_ckv) * size_of(dtype);
        gather();
      };
      run(expected, [&] { reference::gather(args); });
      run(actual, [&] { run_gather(set_, args, pool_); });
      EXPECT_EQ(expected, actual) << form.name << " to " << name(dtype);
    }
}

/// Tests copies large enough that rows go past the caches.
TEST_P(RowOperationsTest, LargeCopiesAreTheSame) {
  constexpr int64_t kTokens = 15360;
  for (size_t f : {size_t{0}, size_t{8}}) {
    const Form& form = kForms[f];
    TestCache expected(form, kTokens / 64, 64), actual(form, kTokens / 64, 64);
    const auto rows = random_rows(kTokens * 576, DType::kBF16, false);
    const std::vector<int64_t> slots = random_slots(kTokens);
    core::AppendArgs append = {.num_tokens = kTokens,
                               .dtype = DType::kBF16,
                               .ckv = rows.data(),
                               .ckv_stride_token = 576,
                               .kpe = rows.data() + 1024,
                               .kpe_stride_token = 576,
                               .slot_mapping = slots.data(),
                               .cache = expected.get()};
    reference::append(append);
    append.cache = actual.get();
    run_append(set_, append, pool_);
    EXPECT_TRUE(expected == actual) << form.name;

    std::vector<int32_t> table(kTokens / 64);
    std::iota(table.rbegin(), table.rend(), 0);
    const std::vector<int32_t> kv_indptr = {0, kTokens / 64}, kv_len = {kTokens}, out_indptr = {0, kTokens};
    std::vector<uint16_t> outs[2];
    for (int i = 0; i < 2; ++i) {
      outs[i].resize(static_cast<size_t>(kTokens) * 576);
      const core::GatherArgs gather = {.batch_size = 1,
                                       .num_rows = kTokens,
                                       .cache = expected.get(),
                                       .pages = {.page_size = 64,
                                                 .batch_size = 1,
                                                 .table = table.data(),
                                                 .kv_indptr = kv_indptr.data(),
                                                 .kv_len = kv_len.data()},
                                       .out_indptr = out_indptr.data(),
                                       .out_ckv = outs[i].data(),
                                       .out_ckv_stride_token = 576,
                                       .out_kpe = outs[i].data() + 512,
                                       .out_kpe_stride_token = 576};
      if (i == 0)
        reference::gather(gather);
      else
        run_gather(set_, gather, pool_);
    }
    EXPECT_EQ(outs[0], outs[1]) << form.name;
  }
}

bool same_widths(const Form& a, const Form& b) { return a.d_ckv == b.d_ckv && a.d_kpe == b.d_kpe; }

TEST_P(RowOperationsTest, CopyPagesBetweenAllFormsOfEqualWidths) {
  for (const Form& from_form : kForms) {
    TestCache from(from_form, 8, 16);
    fill(from.get(), random_rows(128 * (from_form.d_ckv + from_form.d_kpe), DType::kF32, false), DType::kF32);
    for (const Form& to_form : kForms) {
      if (!same_widths(from_form, to_form)) continue;
      for (float scale : {0.37F, 0.5F})
        for (int32_t to_page : {4, 16, 32}) {
          TestCache expected(to_form, 160 / to_page, to_page, scale), actual(to_form, 160 / to_page, to_page, scale);
          const std::vector<int32_t> from_pages = {6, 0, 3, 7};
          std::vector<int32_t> to_pages(static_cast<size_t>(64 / to_page));
          for (size_t i = 0; i < to_pages.size(); ++i)
            to_pages[i] = static_cast<int32_t>(2 * (to_pages.size() - 1 - i));
          core::CopyPagesArgs args = {.from = from.get(),
                                      .to = expected.get(),
                                      .num_from = 4,
                                      .num_to = static_cast<int64_t>(to_pages.size()),
                                      .from_pages = from_pages.data(),
                                      .to_pages = to_pages.data()};
          reference::copy_pages(args);
          args.to = actual.get();
          run_copy_pages(set_, args, pool_);
          EXPECT_TRUE(expected == actual) << from_form.name << " to " << to_form.name << ", pages of " << to_page;
        }
    }
  }
}

TEST_P(RowOperationsTest, AppendRopeRotatesAsTheReference) {
  constexpr int64_t kTokens = 20;
  constexpr int32_t kHeads = 3;
  for (const Form& form : kForms)
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
      for (DType out_dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3})
        for (bool interleaved : {false, true}) {
          TestCache expected(form, 3, 16), actual(form, 3, 16);
          const int32_t plain = expected.get().d_plain(), rotary = expected.get().d_rotary(), width = plain + rotary;
          if (rotary == 0) continue;
          const auto keys = random_rows(kTokens * width, dtype, false);
          const auto queries = random_rows(kTokens * kHeads * width, dtype, false);
          const auto cos_sin = random_rows(50 * rotary, DType::kF32, false);
          std::vector<int64_t> positions(kTokens);
          for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int64_t>(i * 7 % 50);
          const std::vector<int64_t> slots = random_slots(40);
          const float q_scale = 0.3F;
          std::vector<std::byte> q_expected(static_cast<size_t>(kTokens * kHeads * width) * size_of(out_dtype));
          std::vector<std::byte> q_actual = q_expected;
          core::AppendRopeArgs args = {.num_tokens = kTokens,
                                       .num_heads = kHeads,
                                       .q_dtype = dtype,
                                       .q_nope = queries.data(),
                                       .q_nope_stride_token = kHeads * width,
                                       .q_nope_stride_head = width,
                                       .q_pe = queries.data() + static_cast<size_t>(plain) * size_of(dtype),
                                       .q_pe_stride_token = kHeads * width,
                                       .q_pe_stride_head = width,
                                       .q_out_dtype = out_dtype,
                                       .q_out = q_expected.data(),
                                       .q_out_stride_token = kHeads * width,
                                       .q_out_stride_head = width,
                                       .q_scale = &q_scale,
                                       .dtype = dtype,
                                       .ckv = keys.data(),
                                       .ckv_stride_token = width,
                                       .kpe = keys.data() + static_cast<size_t>(plain) * size_of(dtype),
                                       .kpe_stride_token = width,
                                       .cos_sin = reinterpret_cast<const float*>(cos_sin.data()),
                                       .cos_sin_stride_position = rotary,
                                       .positions = positions.data(),
                                       .interleaved = interleaved,
                                       .slot_mapping = slots.data(),
                                       .cache = expected.get()};
          reference::append_rope(args);
          args.cache = actual.get();
          args.q_out = q_actual.data();
          run_append_rope(set_, args, pool_);
          EXPECT_TRUE(expected == actual) << form.name << " " << name(dtype) << " " << interleaved;
          EXPECT_EQ(q_expected, q_actual) << form.name << " " << name(dtype) << " to " << name(out_dtype);
        }
}

/// Tests more angles than are turned at a time.
TEST_P(RowOperationsTest, AppendRopeTakesWideRotaryParts) {
  for (bool interleaved : {false, true}) {
    const Form form = {"wide", CacheFormat::kBF16, 8, 700};
    TestCache expected(form, 1, 4), actual(form, 1, 4);
    const auto keys = random_rows(4 * 708, DType::kBF16, false);
    const auto cos_sin = random_rows(4 * 700, DType::kF32, false);
    const std::vector<int64_t> positions = {3, 2, 0, 1}, slots = {0, 2, 3, 1};
    core::AppendRopeArgs args = {.num_tokens = 4,
                                 .dtype = DType::kBF16,
                                 .ckv = keys.data(),
                                 .ckv_stride_token = 708,
                                 .kpe = keys.data() + 16,
                                 .kpe_stride_token = 708,
                                 .cos_sin = reinterpret_cast<const float*>(cos_sin.data()),
                                 .cos_sin_stride_position = 700,
                                 .positions = positions.data(),
                                 .interleaved = interleaved,
                                 .slot_mapping = slots.data(),
                                 .cache = expected.get()};
    reference::append_rope(args);
    args.cache = actual.get();
    run_append_rope(set_, args, pool_);
    EXPECT_TRUE(expected == actual) << interleaved;
  }
}

TEST_P(RowOperationsTest, BlockTablesBecomeCsr) {
  std::vector<int32_t> table(7 * 10);
  std::iota(table.begin(), table.end(), 100);
  const std::vector<int32_t> kv_len = {0, 1, 16, 17, 160, 0, 31};
  std::vector<int32_t> indptr[2], indices[2];
  for (size_t i = 0; i < 2; ++i) {
    indptr[i].assign(8, -7);
    indices[i].assign(20, -7);
    const core::BlockTableToCsrArgs args = {.batch_size = 7,
                                            .page_size = 16,
                                            .block_table = table.data(),
                                            .block_table_stride_request = 10,
                                            .kv_len = kv_len.data(),
                                            .kv_indptr = indptr[i].data(),
                                            .kv_indices = indices[i].data()};
    if (i == 0)
      reference::block_table_to_csr(args);
    else
      run_block_table_to_csr(set_, args, pool_);
  }
  EXPECT_EQ(indptr[0], indptr[1]);
  EXPECT_EQ(indices[0], indices[1]);
  EXPECT_EQ(indices[1].back(), -7);
}

TEST_P(RowOperationsTest, PhysicalSlotsAsTheReference) {
  constexpr int32_t kTopk = 40;
  const std::vector<int32_t> kv_len = {30, 0, 100}, qo_indptr = {0, 2, 3, 7};
  std::vector<int32_t> table(3 * 16);
  std::iota(table.begin(), table.end(), 9);
  std::uniform_int_distribution<int32_t> any(-3, 120);
  std::vector<int32_t> indices(7 * kTopk);
  for (int32_t& index : indices) index = any(random_);
  indices[5] = INT32_MIN;
  indices[6] = INT32_MAX;
  const std::vector<int32_t> lengths = {40, 0, 40, 7, -5, 99, 40};
  for (bool compact : {false, true})
    for (bool in_place : {false, true})
      for (const ContextParallel& share :
           {ContextParallel{0, 1, 1}, ContextParallel{1, 3, 1}, ContextParallel{0, 2, 4}}) {
        std::vector<int32_t> slots[2], counts[2];
        for (size_t i = 0; i < 2; ++i) {
          slots[i] = indices;
          counts[i].assign(7, -9);
          core::PhysicalSlotsArgs args = {.num_tokens = 7,
                                          .topk = kTopk,
                                          .num_slots = kTopk,
                                          .indices = in_place ? slots[i].data() : indices.data(),
                                          .indices_stride_token = kTopk,
                                          .topk_length = lengths.data(),
                                          .queries = {.indptr = qo_indptr.data()},
                                          .pages = {.page_size = 8,
                                                    .batch_size = 3,
                                                    .table = table.data(),
                                                    .table_stride_request = 16,
                                                    .kv_len = kv_len.data()},
                                          .context_parallel = share,
                                          .compact = compact,
                                          .slots = slots[i].data(),
                                          .slots_stride_token = kTopk,
                                          .valid_count = counts[i].data()};
          if (i == 0)
            reference::physical_slots(args);
          else
            run_physical_slots(set_, args, pool_);
        }
        EXPECT_EQ(slots[0], slots[1]) << compact << in_place << share.world;
        EXPECT_EQ(counts[0], counts[1]);
      }
}

MLA_FOR_LEVELS_OF_ALL_OPERATIONS(RowOperationsTest);

}  // namespace
}  // namespace mla::cpu
