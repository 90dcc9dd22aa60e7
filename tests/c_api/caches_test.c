/* SPDX-License-Identifier: Apache-2.0 */
/* Tests what writes, reads and copies caches. */
#include "c_api_test.h"

#include <math.h>

void test_append_and_gather(const mla_context* context) {
  static problem p;
  fill(&p);
  static float rows[3 * kQk];
  static uint16_t gathered[kKeys * kQk];
  int64_t slots[] = {3 * kPageSize + 1, -1, 2 * kPageSize}; /* tokens 1 and 4 of the request */
  for (size_t i = 0; i < 3 * kQk; ++i) rows[i] = value_at(i + 5);
  int64_t rows_shape[] = {3, kQk}, slots_shape[] = {3}, out_shape[] = {kKeys, kQk}, indptr_shape[] = {2};
  mla_tensor trows = tensor(rows, kF32, 2, rows_shape), tslots = tensor(slots, kI64, 1, slots_shape);
  mla_append_params append = mla_append_params_init();
  append.kv = &trows;
  append.slot_mapping = &tslots;
  append.cache.kv = &p.cache_tensor;
  CHECK(mla_append_run(context, &append) == MLA_OK);

  int32_t indptr[] = {0, kKeys};
  mla_tensor tout = tensor(gathered, kBf16, 2, out_shape), tindptr = tensor(indptr, kI32, 1, indptr_shape);
  mla_gather_params gather = mla_gather_params_init();
  gather.cache.kv = &p.cache_tensor;
  gather.pages = p.params.pages;
  gather.out_indptr = &tindptr;
  gather.out_kv = &tout;
  CHECK(mla_gather_run(context, &gather) == MLA_OK);
  static problem before;
  fill(&before);
  for (int token = 0; token < kKeys; ++token) {
    int equal = 1;
    for (int d = 0; d < kQk; ++d) {
      uint16_t expected = cache_row(&before, token)[d];
      if (token == 1) expected = to_bf16(rows[d]);
      if (token == 4) expected = to_bf16(rows[2 * kQk + d]);
      equal = equal && gathered[token * kQk + d] == expected;
    }
    CHECK(equal);
  }
}

/* A key rotated by a right angle into an fp8_ds_mla page, then copied into bf16. */
void test_writers(const mla_context* context) {
  static uint8_t packed[2 * 656];
  static float ckv[512], kpe[64], cos_sin[2 * 64];
  static uint16_t rows[2 * 576];
  for (int i = 0; i < 512; ++i) ckv[i] = i % 2 == 0 ? 448.0F : -2.0F;
  for (int i = 0; i < 64; ++i) kpe[i] = (float)(i + 1);
  for (int i = 0; i < 32; ++i) {
    cos_sin[i] = 1.0F;           /* position 0 */
    cos_sin[64 + 32 + i] = 1.0F; /* position 1: sines of a right angle */
  }
  int64_t positions[] = {1}, slots[] = {1}, token[] = {1};
  int64_t ckv_shape[] = {1, 512}, kpe_shape[] = {1, 64}, table_shape[] = {2, 64}, packed_shape[] = {2, 1, 656};
  mla_tensor tckv = tensor(ckv, kF32, 2, ckv_shape), tkpe = tensor(kpe, kF32, 2, kpe_shape);
  mla_tensor ttable = tensor(cos_sin, kF32, 2, table_shape), tpacked = tensor(packed, kU8, 3, packed_shape);
  mla_tensor tpositions = tensor(positions, kI64, 1, token), tslots = tensor(slots, kI64, 1, token);
  mla_append_rope_params rope = mla_append_rope_params_init();
  rope.ckv = &tckv;
  rope.kpe = &tkpe;
  rope.cos_sin = &ttable;
  rope.positions = &tpositions;
  rope.slot_mapping = &tslots;
  rope.cache.format = MLA_CACHE_FP8_DS_MLA;
  rope.cache.kv = &tpacked;
  CHECK(rope.interleaved == 1);
  CHECK(mla_append_rope_run(context, &rope) == MLA_OK);
  float scale = 0.0F;
  memcpy(&scale, packed + 656 + 512, sizeof scale);
  CHECK(fabsf(scale - 1.0F) < 1e-6F);
  CHECK(packed[656] == 0x7E && packed[657] == 0xC0);

  int32_t from_pages[] = {1}, to_pages[] = {0};
  int64_t rows_shape[] = {2, 1, 576};
  mla_tensor tfrom = tensor(from_pages, kI32, 1, token), tto = tensor(to_pages, kI32, 1, token);
  mla_tensor trows = tensor(rows, kBf16, 3, rows_shape);
  mla_copy_pages_params copy = mla_copy_pages_params_init();
  copy.from = rope.cache;
  copy.from_pages = &tfrom;
  copy.to.kv = &trows;
  copy.to_pages = &tto;
  CHECK(mla_copy_pages_run(context, &copy) == MLA_OK);
  CHECK(from_bf16(rows[0]) == 448.0F && from_bf16(rows[1]) == -2.0F);
  /* (x, y) became (-y, x). */
  for (int i = 0; i < 64; i += 2)
    CHECK(from_bf16(rows[512 + i]) == -(float)(i + 2) && from_bf16(rows[513 + i]) == (float)(i + 1));
  CHECK(rows[576] == 0);
  tto.dtype = kI64;
  CHECK_ERROR(mla_copy_pages_run(context, &copy), MLA_INVALID_ARGUMENT,
              "copy_pages: to_pages: expected int32, got int64");
  copy.to_scales.reserved = 1;
  CHECK_ERROR(mla_copy_pages_run(context, &copy), MLA_INVALID_ARGUMENT,
              "copy_pages: to_scales.reserved: expected 0, got 1");
  copy.from_scales.kpe_scale = &tfrom;
  copy.to_scales.reserved = 0;
  CHECK_ERROR(mla_copy_pages_run(context, &copy), MLA_INVALID_ARGUMENT,
              "copy_pages: from_scales.kpe_scale: expected none for fp8_ds_mla, got a tensor");
}

void test_around_attention(const mla_context* context) {
  static unsigned char packed[2 * 656];
  static float kpe[64], cos_sin[2 * 64];
  for (int i = 0; i < 32; ++i) cos_sin[64 + 32 + i] = 1.0F; /* position 1: sines of a right angle */
  int64_t positions[] = {1}, slots[] = {1}, token[] = {1};
  int64_t ckv_shape[] = {1, 512}, kpe_shape[] = {1, 64}, table_shape[] = {2, 64}, packed_shape[] = {2, 1, 656};
  mla_tensor tkpe = tensor(kpe, kF32, 2, kpe_shape), ttable = tensor(cos_sin, kF32, 2, table_shape);
  mla_tensor tpacked = tensor(packed, kU8, 3, packed_shape);
  mla_tensor tpositions = tensor(positions, kI64, 1, token), tslots = tensor(slots, kI64, 1, token);
  /* A key of equal channels has the norm 1, with which its weight is multiplied. */
  float weight[512], latent[512];
  for (int i = 0; i < 512; ++i) {
    weight[i] = 448.0F * 2.0F;
    latent[i] = 3.0F;
  }
  int64_t weight_shape[] = {512};
  mla_tensor tweight = tensor(weight, kF32, 1, weight_shape), tlatent = tensor(latent, kF32, 2, ckv_shape);
  mla_append_rope_params norm = mla_append_rope_params_init();
  norm.ckv = &tlatent;
  norm.kpe = &tkpe;
  norm.cos_sin = &ttable;
  norm.positions = &tpositions;
  norm.slot_mapping = &tslots;
  norm.cache.format = MLA_CACHE_FP8_DS_MLA;
  norm.cache.kv = &tpacked;
  CHECK(norm.norm_eps == 1e-6F && norm.q_norm == 0);
  norm.norm_weight = &tweight;
  norm.norm_eps = 0.0F;
  CHECK(mla_append_rope_run(context, &norm) == MLA_OK);
  float scale = 0.0F;
  memcpy(&scale, packed + 656 + 512, sizeof scale);
  CHECK(scale == 2.0F);
  CHECK(packed[656] == 0x7E && packed[656 + 511] == 0x7E);
  norm.norm_weight = NULL;
  norm.q_norm = 1;
  CHECK_ERROR(mla_append_rope_run(context, &norm), MLA_INVALID_ARGUMENT,
              "append_rope: q_norm: expected q_nope with it");

  /* Of a turned output, position 1 exchanges x and y. */
  float out_scale[4] = {0};
  unsigned char codes[512] = {0};
  for (int i = 0; i < 64; ++i) latent[448 + i] = i % 2 == 0 ? 448.0F : 0.0F;
  int64_t o_shape[] = {1, 1, 512}, scale_shape[] = {1, 1, 4};
  mla_tensor to = tensor(latent, kF32, 3, o_shape), tcodes = tensor(codes, kE4m3, 3, o_shape);
  mla_tensor tout_scale = tensor(out_scale, kF32, 3, scale_shape);
  mla_finish_output_params finish = mla_finish_output_params_init();
  finish.o = &to;
  finish.cos_sin = &ttable;
  finish.positions = &tpositions;
  finish.out = &tcodes;
  finish.scale = &tout_scale;
  CHECK(finish.interleaved == 1);
  CHECK(mla_finish_output_run(context, &finish) == MLA_OK);
  CHECK(out_scale[0] == 1.0F / 128.0F && out_scale[3] == 1.0F);
  CHECK(codes[448] == 0 && codes[449] == 0xFE); /* (448, 0) becomes (0, -448) */
  finish.any_scales = 1;
  CHECK(mla_finish_output_run(context, &finish) == MLA_OK);
  CHECK(out_scale[0] == 3.0F / 448.0F && codes[0] == 0x7E);
  finish.scale = NULL;
  CHECK_ERROR(mla_finish_output_run(context, &finish), MLA_INVALID_ARGUMENT,
              "finish_output: scale: expected a tensor, got none");
}
