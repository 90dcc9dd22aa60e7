/* SPDX-License-Identifier: Apache-2.0 */
/* Tests compress: its defaults, runs into both kinds of caches, and what is refused. */
#include "c_api_test.h"

#include <math.h>

/* Pairs of tokens 0 ... 3 of one request with four channels, token t's being 4 t + c; equal scores make means. */
typedef struct pairs {
  float kv[4 * 4], score[4 * 4], bias[2 * 4], state[1 * 2 * 8], latent[4 * 4], cos_sin[3 * 2];
  uint16_t cache[2 * 4];
  int32_t kv_len[1], table[1];
  int64_t slots[4];
  int64_t kv_shape[2], bias_shape[2], state_shape[3], table_shape[2], one[1], slots_shape[1], angles_shape[2],
      cache_shape[3];
  mla_tensor kv_tensor, score_tensor, bias_tensor, state_tensor, table_tensor, len_tensor, latent_tensor, slots_tensor,
      angles_tensor, cache_tensor;
  mla_compress_params params;
} pairs;

/* Sets the call for tokens [begin, end). */
static void fill_pairs(pairs* p, int64_t begin, int64_t end) {
  const int64_t count = end - begin;
  p->kv_shape[0] = p->slots_shape[0] = count;
  p->kv_shape[1] = 4;
  p->bias_shape[0] = 2;
  p->bias_shape[1] = 4;
  p->state_shape[0] = 1;
  p->state_shape[1] = 2;
  p->state_shape[2] = 8;
  p->table_shape[0] = p->table_shape[1] = p->one[0] = 1;
  p->angles_shape[0] = 3;
  p->angles_shape[1] = 2;
  p->cache_shape[0] = 1;
  p->cache_shape[1] = 2;
  p->cache_shape[2] = 4;
  for (int i = 0; i < 16; ++i) p->kv[i] = (float)i;
  p->kv_len[0] = (int32_t)end;
  p->slots[1] = 0;
  p->slots[3] = 1;
  p->slots[0] = p->slots[2] = 99;       /* of no group's end */
  p->cos_sin[0] = p->cos_sin[5] = 1.0F; /* position 2 turns by a right angle */
  p->kv_tensor = tensor(p->kv + 4 * begin, kF32, 2, p->kv_shape);
  p->score_tensor = tensor(p->score + 4 * begin, kF32, 2, p->kv_shape);
  p->bias_tensor = tensor(p->bias, kF32, 2, p->bias_shape);
  p->state_tensor = tensor(p->state, kF32, 3, p->state_shape);
  p->table_tensor = tensor(p->table, kI32, 2, p->table_shape);
  p->len_tensor = tensor(p->kv_len, kI32, 1, p->one);
  p->latent_tensor = tensor(p->latent + 4 * begin, kF32, 2, p->kv_shape);
  p->slots_tensor = tensor(p->slots + begin, kI64, 1, p->slots_shape);
  p->angles_tensor = tensor(p->cos_sin, kF32, 2, p->angles_shape);
  p->cache_tensor = tensor(p->cache, kBf16, 3, p->cache_shape);
  p->params = mla_compress_params_init();
  p->params.kv = &p->kv_tensor;
  p->params.score = &p->score_tensor;
  p->params.position_bias = &p->bias_tensor;
  p->params.kv_len = &p->len_tensor;
  p->params.state = &p->state_tensor;
  p->params.state_table = &p->table_tensor;
  p->params.latent = &p->latent_tensor;
  p->params.slot_mapping = &p->slots_tensor;
  p->params.cos_sin = &p->angles_tensor;
  p->params.ratio = 2;
  p->params.cache.kv = &p->cache_tensor;
}

/* Keys of ones: a norm of twos. */
static void expect_keys(const mla_context* context, int32_t any_scales, uint8_t code, float scale) {
  float kv[128], weight[128], latent[128], stored = 0.0F;
  uint8_t keys[2 * 132] = {0};
  int32_t kv_len[] = {5};
  int64_t slots[] = {1}, shape[] = {1, 128}, one[] = {1}, width[] = {128}, keys_shape[] = {1, 2 * 132};
  for (int i = 0; i < 128; ++i) {
    kv[i] = 2.0F;
    weight[i] = 1.0F;
  }
  mla_tensor tkv = tensor(kv, kF32, 2, shape), tlatent = tensor(latent, kF32, 2, shape);
  mla_tensor tweight = tensor(weight, kF32, 1, width), tlen = tensor(kv_len, kI32, 1, one);
  mla_tensor tslots = tensor(slots, kI64, 1, one), tkeys = tensor(keys, kU8, 2, keys_shape);
  mla_compress_params params = mla_compress_params_init();
  params.kv = &tkv;
  params.kv_len = &tlen;
  params.norm_weight = &tweight;
  params.norm_eps = 0.0F;
  params.latent = &tlatent;
  params.slot_mapping = &tslots;
  params.any_scales = any_scales;
  params.indexer.kv = &tkeys;
  params.indexer.page_size = 2;
  CHECK(mla_compress_run(context, &params) == MLA_OK);
  memcpy(&stored, keys + 2 * 128 + 4, sizeof stored);
  CHECK(fabsf(stored - scale) < 1e-6F);
  int equal = 1;
  for (int i = 0; i < 128; ++i)
    equal = equal && keys[i] == 0 && keys[128 + i] == code && fabsf(latent[i] - 1.0F) < 1e-6F;
  CHECK(equal);
}

/* What tokens 0 ... 3 append beside their latents: two channels each, and two that turn. */
typedef struct window {
  float ckv[4 * 2], kpe[4 * 2], cos_sin[4 * 2];
  uint16_t cache[4 * 4];
  int64_t positions[4], slots[4], rows_shape[2], list_shape[1], cache_shape[3];
  mla_tensor ckv_tensor, kpe_tensor, angles_tensor, positions_tensor, slots_tensor, cache_tensor;
  mla_append_rope_params params;
} window;

static void fill_window(window* w) {
  w->rows_shape[0] = w->list_shape[0] = w->cache_shape[1] = w->cache_shape[2] = 4;
  w->rows_shape[1] = 2;
  w->cache_shape[0] = 1;
  for (int t = 0; t < 4; ++t) {
    w->ckv[2 * t] = w->ckv[2 * t + 1] = (float)t;
    w->kpe[2 * t] = 1.0F;
    w->cos_sin[2 * t] = (float)(t % 2 == 0); /* odd positions turn by a right angle */
    w->cos_sin[2 * t + 1] = (float)(t % 2);
    w->positions[t] = t;
    w->slots[t] = 3 - t;
  }
  w->ckv_tensor = tensor(w->ckv, kF32, 2, w->rows_shape);
  w->kpe_tensor = tensor(w->kpe, kF32, 2, w->rows_shape);
  w->angles_tensor = tensor(w->cos_sin, kF32, 2, w->rows_shape);
  w->positions_tensor = tensor(w->positions, kI64, 1, w->list_shape);
  w->slots_tensor = tensor(w->slots, kI64, 1, w->list_shape);
  w->cache_tensor = tensor(w->cache, kBf16, 3, w->cache_shape);
  w->params = mla_append_rope_params_init();
  w->params.ckv = &w->ckv_tensor;
  w->params.kpe = &w->kpe_tensor;
  w->params.cos_sin = &w->angles_tensor;
  w->params.positions = &w->positions_tensor;
  w->params.slot_mapping = &w->slots_tensor;
  w->params.cache.kv = &w->cache_tensor;
}

void test_compress_append(const mla_context* context) {
  static pairs p;
  static window w;
  fill_pairs(&p, 0, 4);
  fill_window(&w);
  p.params.append = &w.params;
  CHECK(mla_compress_run(context, &p.params) == MLA_OK);
  CHECK(from_bf16(p.cache[0]) == 2.0F && fabsf(p.latent[12] - 10.0F) < 1e-5F);
  for (int t = 0; t < 4; ++t) {
    const uint16_t* row = w.cache + 4 * (3 - t);
    CHECK(from_bf16(row[0]) == (float)t && from_bf16(row[1]) == (float)t);
    CHECK(from_bf16(row[2]) == (float)(t % 2 == 0) && from_bf16(row[3]) == (float)(t % 2));
  }

  /* A struct of the version before norms, which the reader takes for one without them. */
  memset(w.cache, 0, sizeof w.cache);
  w.params.struct_size = offsetof(mla_append_rope_params, q_norm_weight);
  w.params.q_norm = 7;
  CHECK(mla_compress_run(context, &p.params) == MLA_OK);
  CHECK(from_bf16(w.cache[0]) == 3.0F);

  memset(w.cache, 0, sizeof w.cache);
  memset(p.latent, 0, sizeof p.latent);
  fill_window(&w);
  w.params.ckv = NULL;
  CHECK_ERROR(mla_compress_run(context, &p.params), MLA_INVALID_ARGUMENT,
              "compress: append.ckv: expected a tensor, got none");
  fill_window(&w);
  w.params.interleaved = 2;
  CHECK_ERROR(mla_compress_run(context, &p.params), MLA_INVALID_ARGUMENT,
              "compress: append.interleaved: expected 0 or 1, got 2");
  fill_window(&w);
  w.params.scales.ckv_scale = &w.kpe_tensor;
  CHECK_ERROR(mla_compress_run(context, &p.params), MLA_INVALID_ARGUMENT,
              "compress: append.scales.ckv_scale: expected none for bf16, got a tensor");
  fill_window(&w);
  w.params.reserved = 1;
  CHECK_ERROR(mla_compress_run(context, &p.params), MLA_INVALID_ARGUMENT,
              "compress: append.reserved: expected 0, got 1");
  fill_window(&w);
  w.params.struct_size = 8;
  CHECK(mla_compress_run(context, &p.params) == MLA_INVALID_ARGUMENT);
  CHECK(strstr(mla_last_error(), "compress: append: struct_size: expected ") == mla_last_error());
  fill_window(&w);
  w.cache_tensor.data = p.cache;
  CHECK(mla_compress_run(context, &p.params) == MLA_INVALID_ARGUMENT);
  CHECK(strstr(mla_last_error(), "compress: cache.kv: expected memory apart from that of append.cache.kv") ==
        mla_last_error());
  for (int i = 0; i < 16; ++i) CHECK(p.latent[i] == 0.0F && w.cache[i] == 0);
}

void test_compress(const mla_context* context) {
  const mla_compress_params defaults = mla_compress_params_init();
  CHECK(defaults.struct_size == sizeof defaults);
  CHECK(defaults.ratio == 1 && defaults.overlap == 0 && defaults.interleaved == 1 && defaults.any_scales == 0);
  CHECK(defaults.norm_eps == 1e-6F && defaults.reserved == 0);
  CHECK(defaults.kv == NULL && defaults.state == NULL && defaults.cache.kv == NULL && defaults.indexer.kv == NULL);
  CHECK(defaults.stream == NULL && defaults.append == NULL);

  static pairs p;
  fill_pairs(&p, 0, 3);
  CHECK(mla_compress_run(context, &p.params) == MLA_OK);
  fill_pairs(&p, 3, 4);
  CHECK(mla_compress_run(context, &p.params) == MLA_OK);
  const float expected[] = {2, 3, 4, 5, 10, 11, -13, 12}; /* (12, 13) by a right angle */
  for (int c = 0; c < 4; ++c) {
    CHECK(fabsf(p.latent[4 + c] - (float)(2 + c)) < 1e-5F);
    CHECK(fabsf(p.latent[12 + c] - (float)(10 + c)) < 1e-5F);
    CHECK(p.latent[c] == 0.0F && p.latent[8 + c] == 0.0F);
  }
  for (int i = 0; i < 8; ++i) CHECK(from_bf16(p.cache[i]) == expected[i]);
  /* Both halves of the state: kv of token 3, then its scores. */
  for (int c = 0; c < 4; ++c) CHECK(p.state[8 + c] == (float)(12 + c) && p.state[12 + c] == 0.0F);

  /* By halves instead of neighbours, and weights of a quarter and three: e^bias is 1 and 3. */
  for (int i = 4; i < 8; ++i) p.bias[i] = logf(3.0F);
  fill_pairs(&p, 0, 4);
  p.params.interleaved = 0;
  CHECK(mla_compress_run(context, &p.params) == MLA_OK);
  for (int c = 0; c < 4; ++c) CHECK(fabsf(p.latent[12 + c] - (float)(11 + c)) < 1e-5F);

  /* Two channels that overlap: the second latent takes the first half of tokens 0 and 1, the second of 2 and 3. */
  fill_pairs(&p, 0, 4);
  int64_t latent_shape[] = {4, 2}, table_shape[] = {1, 2}, state_shape[] = {2, 2, 8};
  int32_t table[] = {1, 0};
  static float state[2 * 2 * 8];
  p.latent_tensor = tensor(p.latent, kF32, 2, latent_shape);
  p.table_tensor = tensor(table, kI32, 2, table_shape);
  p.state_tensor = tensor(state, kF32, 3, state_shape);
  p.params.overlap = 1;
  p.params.position_bias = NULL;
  p.params.slot_mapping = p.params.cos_sin = p.params.cache.kv = NULL;
  CHECK(mla_compress_run(context, &p.params) == MLA_OK);
  CHECK(fabsf(p.latent[6] - 7.0F) < 1e-5F && fabsf(p.latent[7] - 8.0F) < 1e-5F); /* of 0, 4, 10 and 14 */
  CHECK(state[16] == 0.0F && state[8] == 12.0F);

  expect_keys(context, 0, 0x78, 1.0F / 256);
  expect_keys(context, 1, 0x7E, 1.0F / 448);
}

void test_compress_errors(const mla_context* context) {
  static pairs p;
  CHECK_ERROR(mla_compress_run(NULL, &p.params), MLA_INVALID_ARGUMENT,
              "compress: context: expected a pointer, got null");
  CHECK_ERROR(mla_compress_run(context, NULL), MLA_INVALID_ARGUMENT, "compress: params: expected a pointer, got null");
  fill_pairs(&p, 0, 3);
  p.params.kv = NULL;
  CHECK_ERROR(mla_compress_run(context, &p.params), MLA_INVALID_ARGUMENT, "compress: kv: expected a tensor, got none");
  fill_pairs(&p, 0, 3);
  p.params.interleaved = 2;
  CHECK_ERROR(mla_compress_run(context, &p.params), MLA_INVALID_ARGUMENT,
              "compress: interleaved: expected 0 or 1, got 2");
  fill_pairs(&p, 0, 3);
  p.params.overlap = -1;
  CHECK_ERROR(mla_compress_run(context, &p.params), MLA_INVALID_ARGUMENT, "compress: overlap: expected 0 or 1, got -1");
  fill_pairs(&p, 0, 3);
  p.params.any_scales = 3;
  CHECK_ERROR(mla_compress_run(context, &p.params), MLA_INVALID_ARGUMENT,
              "compress: any_scales: expected 0 or 1, got 3");
  fill_pairs(&p, 0, 3);
  p.params.scales.any_scales = 3;
  CHECK_ERROR(mla_compress_run(context, &p.params), MLA_INVALID_ARGUMENT,
              "compress: scales.any_scales: expected 0 or 1, got 3");
  fill_pairs(&p, 0, 3);
  p.params.scales.ckv_scale = &p.len_tensor;
  CHECK_ERROR(mla_compress_run(context, &p.params), MLA_INVALID_ARGUMENT,
              "compress: scales.ckv_scale: expected none for bf16, got a tensor");
  fill_pairs(&p, 0, 3);
  p.params.reserved = 1;
  CHECK_ERROR(mla_compress_run(context, &p.params), MLA_INVALID_ARGUMENT, "compress: reserved: expected 0, got 1");
  fill_pairs(&p, 0, 3);
  p.params.indexer.kv = &p.cache_tensor;
  CHECK_ERROR(mla_compress_run(context, &p.params), MLA_INVALID_ARGUMENT,
              "compress: slot_mapping: expected either cache or indexer beside it, got both");
  fill_pairs(&p, 0, 3);
  p.params.struct_size = 8;
  CHECK(mla_compress_run(context, &p.params) == MLA_INVALID_ARGUMENT);
  CHECK(strstr(mla_last_error(), "compress: struct_size: expected ") == mla_last_error());
  for (int i = 0; i < 16; ++i) CHECK(p.latent[i] == 0.0F && p.state[i] == 0.0F);
  for (int i = 0; i < 8; ++i) CHECK(p.cache[i] == 0);
}
