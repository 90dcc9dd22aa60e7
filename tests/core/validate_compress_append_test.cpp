// SPDX-License-Identifier: Apache-2.0
// Tests how what compress appends beside its latents is validated: as append_rope validates it, with the fields' whole
// paths, and with nothing written by either part.
#include "core/validate.h"
#include "writer_problems.h"

namespace mla::test {
namespace {

/// Pools five tokens as Compress does, and appends their keys, and two heads' queries, to a cache of their own.
struct CompressAppend {
  Compress latents;
  std::vector<uint16_t> q_nope = std::vector<uint16_t>(5 * kHeads * kCkv, 0),
                        q_pe = std::vector<uint16_t>(5 * kHeads * kKpe, 0),
                        q_out = std::vector<uint16_t>(5 * kHeads * (kCkv + kKpe), kSentinel),
                        ckv = std::vector<uint16_t>(5 * kCkv, 0), kpe = std::vector<uint16_t>(5 * kKpe, 0),
                        weight = std::vector<uint16_t>(kCkv + kKpe, 0);
  std::vector<float> cos_sin = std::vector<float>(10 * kKpe, 1.0F);
  std::vector<int64_t> positions = {3, 4, 6, 7, 8}, slots = {0, -1, 31, 5, 6};
  CacheBuffers cache;
  CompressParams params = latents.params;

  CompressAppend() {
    params.append = {.q_nope = of(q_nope, {5, kHeads, kCkv}),
                     .q_pe = of(q_pe, {5, kHeads, kKpe}),
                     .q_out = of(q_out, {5, kHeads, kCkv + kKpe}),
                     .ckv = of(ckv, {5, kCkv}),
                     .kpe = of(kpe, {5, kKpe}),
                     .cos_sin = contiguous(cos_sin.data(), DType::kF32, {10, kKpe}),
                     .positions = contiguous(positions.data(), DType::kI64, {5}),
                     .slot_mapping = contiguous(slots.data(), DType::kI64, {5}),
                     .norm_weight = of(weight, {kCkv + kKpe}),
                     .cache = cache.whole()};
  }
  bool untouched() const { return latents.untouched() && all_sentinels({&q_out, &cache.data}); }
};

using BadAppend = BadCase<CompressAppend>;

TEST(ValidateCompressAppend, RefusesBadInputOfThatPart) {
  expect_refused_directly(std::vector<BadAppend>{
      {"no ckv", [](CompressAppend& p) { p.params.append.ckv = {}; },
       "compress: append.ckv: expected a tensor, got none"},
      {"a cache alone", [](CompressAppend& p) { p.params.append = {.cache = p.cache.whole()}; },
       "compress: append.ckv: expected a tensor, got none"},
      {"other tokens", [](CompressAppend& p) { set_extent(p.params.append.ckv, 0, 4); },
       "compress: append.ckv: expected shape [T = 5, kv_lora_rank = 8], got [4, 8]"},
      {"keys alone, of other tokens",
       [](CompressAppend& p) {
         p.params.append.q_nope = p.params.append.q_pe = p.params.append.q_out = {};
         set_extent(p.params.append.ckv, 0, 4);
       },
       "compress: append.ckv: expected shape [T = 5, kv_lora_rank], got [4, 8]"},
      {"queries without outputs", [](CompressAppend& p) { p.params.append.q_out = {}; },
       "compress: append.q_out: expected a tensor, got none"},
      {"queries of a part", [](CompressAppend& p) { p.params.append.q_nope = {}; },
       "compress: append.q_pe: expected none, since append.q_nope is not given, got a tensor"},
      {"a position beyond the table", [](CompressAppend& p) { p.positions[2] = 10; },
       "compress: append.positions: expected 0 to 9 (the rows of append.cos_sin), got 10 for token 2"},
      {"a slot beyond the cache", [](CompressAppend& p) { p.slots[3] = 32; },
       "compress: append.slot_mapping: expected at most 31 (the last slot of the cache), got 32 for token 3"},
      {"a norm of another width", [](CompressAppend& p) { p.params.append.norm_weight = of(p.weight, {11}); },
       "compress: append.norm_weight: expected shape [kv_lora_rank = 8] or [kv_lora_rank + qk_rope_head_dim = 12], got "
       "[11]"},
      {"a negative epsilon", [](CompressAppend& p) { p.params.append.norm_eps = -1; },
       "compress: append.norm_eps: expected a finite number of at least 0, got -1"},
      {"no cache", [](CompressAppend& p) { p.params.append.cache = {}; },
       "compress: append.cache.kv: expected append.cache.kv, or append.cache.ckv and append.cache.kpe, got none"},
      {"a cache of another width", [](CompressAppend& p) { set_extent(p.params.append.cache.kv, 2, 11); },
       "compress: append.cache.kv: expected shape [num_pages, page_size, d_qk = 12], got [8, 4, 11]"},
      {"on another device",
       [](CompressAppend& p) {
         p.params.append.kpe.device = {DeviceType::kCuda, 1};
       },
       "compress: append.kpe: expected on cpu:0, where kv is, got cuda:1"},
  });
}

TEST(ValidateCompressAppend, RefusesBadInputOfTheOtherPart) {
  expect_refused_directly(std::vector<BadAppend>{
      {"no kv", [](CompressAppend& p) { p.params.kv = {}; }, "compress: kv: expected a tensor, got none"},
      {"a slot beyond the pool", [](CompressAppend& p) { p.latents.slots[0] = 32; },
       "compress: slot_mapping: expected slots below 32, got 32 for token 0"},
  });
}

TEST(ValidateCompressAppend, RefusesOutputsOfOnePartOverTensorsOfTheOther) {
  expect_refused_directly(std::vector<BadAppend>{
      {"one cache for both", [](CompressAppend& p) { p.params.append.cache = p.params.cache; },
       "compress: cache.kv: expected memory apart from that of append.cache.kv, got ranges with 768 bytes in common"},
      {"latents that are the keys", [](CompressAppend& p) { p.params.append.ckv.data = p.params.latent.data; },
       "compress: latent: expected memory apart from that of append.ckv, got ranges with 80 bytes in common"},
      {"a state that is the queries", [](CompressAppend& p) { p.params.append.q_out.data = p.params.state.data; },
       "compress: state: expected memory apart from that of append.q_out, got ranges with 240 bytes in common"},
      {"queries over the pooled tokens", [](CompressAppend& p) { p.params.append.q_out.data = p.latents.score.data(); },
       "compress: append.q_out: expected memory apart from that of score, got ranges with 120 bytes in common"},
      {"the window over the pooled tokens", [](CompressAppend& p) { p.params.kv.data = p.cache.data.data(); },
       "compress: append.cache.kv: expected memory apart from that of kv, got ranges with 120 bytes in common"},
  });
}

TEST(ValidateCompressAppend, InputsMayBeShared) {
  CompressAppend p;
  std::vector<uint16_t> rows(5 * Compress::kWidth, 0);
  p.params.kv = of(rows, {5, Compress::kWidth});
  p.params.append.ckv = of(rows, {5, kCkv});
  p.params.append.kpe = of(rows, {5, kKpe});
  p.params.append.kpe.data = rows.data() + kCkv;
  for (TensorView* view : {&p.params.append.ckv, &p.params.append.kpe}) set_stride(*view, 0, Compress::kWidth);
  p.params.append.norm_weight = p.params.norm_weight;
  p.params.append.cos_sin = p.params.cos_sin;
  p.positions = {0, 1, 2, 3, 4};
  core::CompressArgs args;
  Device device;
  ASSERT_EQ(core::validate(p.params, args, device).message(), "");
  EXPECT_TRUE(args.appends());
  EXPECT_EQ(args.append.num_tokens, 5);
  EXPECT_EQ(args.append.norm_channels, kCkv + kKpe);
  EXPECT_EQ(run(reference_context(), p.params).message(), "");
  EXPECT_NE(p.q_out[0], kSentinel);
  EXPECT_NE(p.cache.data[0], kSentinel);
  EXPECT_NE(p.latents.latent[0], kSentinel);
}

TEST(ValidateCompressAppend, NothingToAppend) {
  CompressAppend p;
  p.params.append = {};
  p.params.append.q_norm = true;  // means nothing without tensors
  core::CompressArgs args;
  Device device;
  ASSERT_EQ(core::validate(p.params, args, device).message(), "");
  EXPECT_FALSE(args.appends());

  CompressAppend none;
  for (TensorView* view :
       {&none.params.kv, &none.params.score, &none.params.latent, &none.params.slot_mapping, &none.params.append.q_nope,
        &none.params.append.q_pe, &none.params.append.q_out, &none.params.append.ckv, &none.params.append.kpe,
        &none.params.append.positions, &none.params.append.slot_mapping})
    set_extent(*view, 0, 0);
  none.latents.qo_indptr = {0, 0, 0};
  EXPECT_EQ(run(reference_context(), none.params).message(), "");
  EXPECT_TRUE(none.untouched());
}

}  // namespace
}  // namespace mla::test
