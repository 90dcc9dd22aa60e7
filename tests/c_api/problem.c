/* SPDX-License-Identifier: Apache-2.0 */
#include "c_api_test.h"

#include <math.h>

const mla_dtype kBf16 = {MLA_DTYPE_BFLOAT, 16, 1};
const mla_dtype kU8 = {MLA_DTYPE_UINT, 8, 1};
const mla_dtype kE4m3 = {MLA_DTYPE_E4M3FN, 8, 1};
const mla_dtype kF32 = {MLA_DTYPE_FLOAT, 32, 1};
const mla_dtype kI32 = {MLA_DTYPE_INT, 32, 1};
const mla_dtype kI64 = {MLA_DTYPE_INT, 64, 1};

mla_tensor tensor(void* data, mla_dtype dtype, int32_t ndim, int64_t* shape) {
  mla_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = MLA_DEVICE_CPU;
  t.ndim = ndim;
  t.dtype = dtype;
  t.shape = shape;
  return t;
}

float value_at(size_t i) { return (float)((int)(i * 37U % 61U) - 30) / 64.0F; }

uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

float from_bf16(uint16_t bits) {
  const uint32_t word = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

void fill(problem* p) {
  memset(p, 0, sizeof *p);
  for (size_t i = 0; i < sizeof p->q / sizeof *p->q; ++i) p->q[i] = value_at(i);
  for (size_t i = 0; i < sizeof p->cache / sizeof *p->cache; ++i) p->cache[i] = to_bf16(value_at(i + 11));
  p->table[0] = 3;
  p->table[1] = 0;
  p->table[2] = 2;
  p->kv_len[0] = kKeys;
  const int64_t q[] = {kTokens, kHeads, kQk}, cache[] = {kPages, kPageSize, kQk}, o[] = {kTokens, kHeads, kCkv};
  memcpy(p->q_shape, q, sizeof q);
  memcpy(p->cache_shape, cache, sizeof cache);
  memcpy(p->o_shape, o, sizeof o);
  p->table_shape[0] = 1;
  p->table_shape[1] = 3;
  p->len_shape[0] = 1;
  p->lse_shape[0] = kTokens;
  p->lse_shape[1] = kHeads;
  p->q_tensor = tensor(p->q, kF32, 3, p->q_shape);
  p->cache_tensor = tensor(p->cache, kBf16, 3, p->cache_shape);
  p->table_tensor = tensor(p->table, kI32, 2, p->table_shape);
  p->len_tensor = tensor(p->kv_len, kI32, 1, p->len_shape);
  p->o_tensor = tensor(p->o, kF32, 3, p->o_shape);
  p->lse_tensor = tensor(p->lse, kF32, 2, p->lse_shape);
  p->params = mla_decode_params_init();
  p->params.q = &p->q_tensor;
  p->params.cache.kv = &p->cache_tensor;
  p->params.pages.block_table = &p->table_tensor;
  p->params.pages.kv_len = &p->len_tensor;
  p->params.sm_scale = 0.125F;
  p->params.o = &p->o_tensor;
  p->params.lse = &p->lse_tensor;
}

const uint16_t* cache_row(const problem* p, int token) {
  return p->cache + ((size_t)p->table[token / kPageSize] * kPageSize + (size_t)(token % kPageSize)) * kQk;
}

void expect_query(const problem* p, int query, int head) {
  const float* q = p->q + ((size_t)query * kHeads + (size_t)head) * kQk;
  const int visible = kKeys - kTokens + query + 1;
  double weight[kKeys], total = 0.0;
  for (int key = 0; key < visible; ++key) {
    double score = 0.0;
    for (int d = 0; d < kQk; ++d) score += (double)q[d] * from_bf16(cache_row(p, key)[d]);
    weight[key] = exp(0.125 * score);
    total += weight[key];
  }
  double worst = 0.0;
  for (int d = 0; d < kCkv; ++d) {
    double expected = 0.0;
    for (int key = 0; key < visible; ++key) expected += weight[key] / total * from_bf16(cache_row(p, key)[d]);
    const double error = fabs(expected - p->o[((size_t)query * kHeads + (size_t)head) * kCkv + (size_t)d]);
    if (error > worst) worst = error;
  }
  CHECK(worst < 4e-3);
  CHECK(fabs(log(total) - p->lse[query * kHeads + head]) < 4e-3);
}
