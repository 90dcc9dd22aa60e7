/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI from C: every operation against values computed here, and its errors. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mla/c_api.h"

static int checks = 0;
static int failures = 0;

#define CHECK(condition)                                                                                \
  do {                                                                                                  \
    ++checks;                                                                                           \
    if (!(condition)) {                                                                                 \
      ++failures;                                                                                       \
      printf("%s:%d: failed: %s (last error: %s)\n", __FILE__, __LINE__, #condition, mla_last_error()); \
    }                                                                                                   \
  } while (0)

#define CHECK_ERROR(call, code, text)             \
  do {                                            \
    CHECK((call) == (code));                      \
    CHECK(strcmp(mla_last_error(), (text)) == 0); \
  } while (0)

enum { kTokens = 2, kHeads = 3, kCkv = 256, kKpe = 64, kQk = kCkv + kKpe, kPages = 4, kPageSize = 2, kKeys = 5 };

static const mla_device kCpu = {MLA_DEVICE_CPU, 0};
static const mla_dtype kBf16 = {MLA_DTYPE_BFLOAT, 16, 1};
static const mla_dtype kF32 = {MLA_DTYPE_FLOAT, 32, 1};
static const mla_dtype kI32 = {MLA_DTYPE_INT, 32, 1};
static const mla_dtype kI64 = {MLA_DTYPE_INT, 64, 1};

static mla_tensor tensor(void* data, mla_dtype dtype, int32_t ndim, int64_t* shape) {
  mla_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device = kCpu;
  t.ndim = ndim;
  t.dtype = dtype;
  t.shape = shape;
  return t;
}

/* Exact in bf16, and different for every index. */
static float value_at(size_t i) { return (float)((int)(i * 37U % 61U) - 30) / 64.0F; }

static uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static float from_bf16(uint16_t bits) {
  const uint32_t word = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

/* One request of kKeys tokens with kTokens queries, its pages out of order. */
typedef struct problem {
  float q[kTokens * kHeads * kQk];
  uint16_t cache[kPages * kPageSize * kQk];
  int32_t table[3], kv_len[1];
  float o[kTokens * kHeads * kCkv], lse[kTokens * kHeads];
  int64_t q_shape[3], cache_shape[3], table_shape[2], len_shape[1], o_shape[3], lse_shape[2];
  mla_tensor q_tensor, cache_tensor, table_tensor, len_tensor, o_tensor, lse_tensor;
  mla_decode_params params;
} problem;

static void fill(problem* p) {
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

static const uint16_t* cache_row(const problem* p, int token) {
  return p->cache + ((size_t)p->table[token / kPageSize] * kPageSize + (size_t)(token % kPageSize)) * kQk;
}

/* Attention of one query by its definition. */
static void expect_query(const problem* p, int query, int head) {
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

static void test_decode(const mla_context* context) {
  static problem p;
  fill(&p);
  size_t size = 1;
  mla_plan* plan = NULL;
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_OK);
  void* workspace = malloc(size + 1);
  CHECK(mla_decode_plan(context, &p.params, workspace, size, &plan) == MLA_OK);
  CHECK(strlen(mla_plan_backend(plan)) > 0);
  CHECK(strlen(mla_plan_describe(plan)) > 0);
  CHECK(mla_decode_run(context, plan, &p.params) == MLA_OK);
  for (int query = 0; query < kTokens; ++query)
    for (int head = 0; head < kHeads; ++head) expect_query(&p, query, head);

  /* The same through strides and a byte offset: the query in two tensors that point into one. */
  static float o[kTokens * kHeads * kCkv];
  memcpy(o, p.o, sizeof o);
  memset(p.o, 0, sizeof p.o);
  int64_t nope_shape[] = {kTokens, kHeads, kCkv}, pe_shape[] = {kTokens, kHeads, kKpe};
  int64_t strides[] = {kHeads * kQk, kQk, 1};
  mla_tensor q_nope = tensor(p.q, kF32, 3, nope_shape);
  mla_tensor q_pe = tensor(p.q, kF32, 3, pe_shape);
  q_nope.strides = strides;
  q_pe.strides = strides;
  q_pe.byte_offset = kCkv * sizeof(float);
  mla_decode_params parts = p.params;
  parts.q = NULL;
  parts.q_nope = &q_nope;
  parts.q_pe = &q_pe;
  CHECK(mla_decode_run(context, plan, &parts) == MLA_OK);
  CHECK(memcmp(o, p.o, sizeof o) == 0);  // NOLINT(bugprone-suspicious-memory-comparison): the same bits

  mla_plan_destroy(plan);
  free(workspace);
}

static void test_prefill(const mla_context* context) {
  /* One query, two keys with equal scores: the mean of the values. */
  static float q[192], k[2 * 192], v[2 * 128], o[128], lse[1];
  int32_t qo[] = {0, 1}, kv[] = {0, 2};
  int64_t q_shape[] = {1, 1, 192}, k_shape[] = {2, 1, 192}, v_shape[] = {2, 1, 128}, o_shape[] = {1, 1, 128};
  int64_t indptr_shape[] = {2}, lse_shape[] = {1, 1};
  for (size_t i = 0; i < 256; ++i) v[i] = value_at(i);
  mla_tensor tq = tensor(q, kF32, 3, q_shape), tk = tensor(k, kF32, 3, k_shape), tv = tensor(v, kF32, 3, v_shape);
  mla_tensor to = tensor(o, kF32, 3, o_shape), tl = tensor(lse, kF32, 2, lse_shape);
  mla_tensor tqo = tensor(qo, kI32, 1, indptr_shape), tkv = tensor(kv, kI32, 1, indptr_shape);
  mla_prefill_params params = mla_prefill_params_init();
  params.q = &tq;
  params.k = &tk;
  params.v = &tv;
  params.qo_indptr = &tqo;
  params.kv_indptr = &tkv;
  params.sm_scale = 1.0F;
  params.o = &to;
  params.lse = &tl;
  size_t size = 0;
  mla_plan* plan = NULL;
  CHECK(mla_prefill_workspace_size(context, &params, &size) == MLA_OK);
  void* workspace = malloc(size + 1);
  CHECK(mla_prefill_plan(context, &params, workspace, size, &plan) == MLA_OK);
  CHECK(mla_prefill_run(context, plan, &params) == MLA_OK);
  for (size_t d = 0; d < 128; ++d) CHECK(fabs(o[d] - 0.5 * ((double)v[d] + v[128 + d])) < 4e-3);
  CHECK(fabs(lse[0] - log(2.0)) < 1e-4);
  mla_plan_destroy(plan);
  free(workspace);
}

static void test_merge_states(const mla_context* context) {
  /* Weights 1 and 3 of 4. */
  float partial_o[] = {1.0F, 2.0F, 5.0F, -2.0F};
  float partial_lse[2], o[2], lse[1];
  partial_lse[0] = 0.0F;
  partial_lse[1] = logf(3.0F);
  int64_t partial_shape[] = {2, 1, 1, 2}, partial_lse_shape[] = {2, 1, 1}, o_shape[] = {1, 1, 2}, lse_shape[] = {1, 1};
  mla_tensor tpo = tensor(partial_o, kF32, 4, partial_shape), tpl = tensor(partial_lse, kF32, 3, partial_lse_shape);
  mla_tensor to = tensor(o, kF32, 3, o_shape), tl = tensor(lse, kF32, 2, lse_shape);
  mla_merge_states_params params = mla_merge_states_params_init();
  params.partial_o = &tpo;
  params.partial_lse = &tpl;
  params.o = &to;
  params.lse = &tl;
  CHECK(mla_merge_states_run(context, &params) == MLA_OK);
  CHECK(fabsf(o[0] - 4.0F) < 1e-5F);
  CHECK(fabsf(o[1] + 1.0F) < 1e-5F);
  CHECK(fabsf(lse[0] - logf(4.0F)) < 1e-5F);
}

static void test_append_and_gather(const mla_context* context) {
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

static void test_errors(const mla_context* context) {
  static problem p;
  fill(&p);
  size_t size = 12345;
  mla_plan* plan = NULL;
  CHECK_ERROR(mla_decode_workspace_size(NULL, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: context: expected a pointer, got null");
  CHECK_ERROR(mla_decode_workspace_size(context, NULL, &size), MLA_INVALID_ARGUMENT,
              "decode: params: expected a pointer, got null");
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, NULL), MLA_INVALID_ARGUMENT,
              "decode: out: expected a pointer, got null");
  CHECK_ERROR(mla_decode_run(context, NULL, &p.params), MLA_INVALID_ARGUMENT,
              "decode: plan: expected a pointer, got null");
  p.kv_len[0] = 7;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: kv_len: expected at most 6 (3 pages of 2), got 7 for request 0");
  CHECK(size == 12345);
  fill(&p);
  p.q_tensor.dtype.bits = 64;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: q: expected an element type of mla_dtype_code, got code 2, 64 bits, 1 lanes");
  fill(&p);
  p.q_tensor.shape = NULL;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: q: expected a shape of 3 extents, got a null pointer");
  fill(&p);
  p.params.causal = 2;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: causal: expected 0 or 1, got 2");
  fill(&p);
  p.params.lse_base = 300;
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_INVALID_ARGUMENT);
  fill(&p);
  p.params.cache.format = MLA_CACHE_FP8_DS_MLA;
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_UNSUPPORTED);
  CHECK(strstr(mla_last_error(), "fp8_ds_mla") != NULL);
  fill(&p);
  p.params.struct_size = 8;
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_INVALID_ARGUMENT);
  CHECK(strstr(mla_last_error(), "decode: struct_size: expected ") == mla_last_error());
  fill(&p);
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_OK);
  if (size > 0) {
    char byte = 0;
    CHECK(mla_decode_plan(context, &p.params, &byte, 1, &plan) == MLA_WORKSPACE_TOO_SMALL);
    CHECK(plan == NULL);
  }

  mla_context_options options = mla_context_options_init();
  mla_context* refused = NULL;
  options.num_threads = -5;
  CHECK_ERROR(mla_context_create(&options, &refused), MLA_INVALID_ARGUMENT,
              "context: num_threads: expected 0 to 1024, got -5");
  options = mla_context_options_init();
  options.num_affinity = 2;
  CHECK(mla_context_create(&options, &refused) == MLA_INVALID_ARGUMENT);
  CHECK(refused == NULL);
  CHECK(mla_context_create(&options, NULL) == MLA_INVALID_ARGUMENT);
  mla_context_destroy(NULL);
  mla_plan_destroy(NULL);
  CHECK(mla_context_num_threads(NULL) == 0);
  CHECK(strcmp(mla_plan_backend(NULL), "") == 0);
}

/* A newer caller's struct: longer, its unknown fields zero or not. */
static void test_struct_growth(const mla_context* context) {
  static problem p;
  fill(&p);
  struct {
    mla_decode_params params;
    int64_t added;
  } newer;
  memset(&newer, 0, sizeof newer);
  newer.params = p.params;
  newer.params.struct_size = sizeof newer;
  size_t size = 0;
  CHECK(mla_decode_workspace_size(context, &newer.params, &size) == MLA_OK);
  newer.added = 1;
  CHECK(mla_decode_workspace_size(context, &newer.params, &size) == MLA_INVALID_ARGUMENT);
}

static void test_listing(void) {
  CHECK(strchr(mla_version(), '.') != NULL);
  size_t count = 0;
  const char* name = NULL;
  for (int32_t op = MLA_DECODE; op <= MLA_GATHER; ++op) {
    CHECK(mla_backend_count(op, &count) == MLA_OK);
    CHECK(count >= 1);
    CHECK(mla_backend_name(op, count - 1, &name) == MLA_OK);
    CHECK(strcmp(name, "reference") == 0);
    CHECK(mla_backend_name(op, count, &name) == MLA_INVALID_ARGUMENT);
  }
  CHECK_ERROR(mla_backend_count(5, &count), MLA_INVALID_ARGUMENT, "backend_count: op: expected 0 to 4, got 5");

  mla_problem wanted = mla_problem_init();
  char text[4096];
  size_t length = 0;
  CHECK(mla_explain(&wanted, "reference", text, sizeof text, &length) == MLA_OK);
  CHECK(strlen(text) == length);
  CHECK(strstr(text, "reference: yes, ") != NULL);
  CHECK(strstr(text, "selected: reference\n") != NULL);
  char few[5] = "????";
  CHECK(mla_explain(&wanted, "reference", few, sizeof few, &length) == MLA_OK);
  CHECK(strncmp(few, text, 4) == 0 && few[4] == '\0');
  CHECK(mla_explain(&wanted, NULL, NULL, 0, &length) == MLA_OK);
  CHECK(length > 0);
  wanted.device.device_type = MLA_DEVICE_CUDA;
  CHECK(mla_explain(&wanted, NULL, text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "selected: none, ") != NULL);
  wanted.cache_format = 9;
  CHECK_ERROR(mla_explain(&wanted, NULL, text, sizeof text, NULL), MLA_INVALID_ARGUMENT,
              "explain: cache_format: expected 0 to 4, got 9");
}

int main(void) {
  CHECK(strcmp(mla_last_error(), "") == 0);
  mla_context_options options = mla_context_options_init();
  options.num_threads = 2;
  mla_context* context = NULL;
  CHECK(mla_context_create(&options, &context) == MLA_OK);
  CHECK(mla_context_num_threads(context) == 2);
  test_decode(context);
  test_prefill(context);
  test_merge_states(context);
  test_append_and_gather(context);
  test_errors(context);
  test_struct_growth(context);
  test_listing();
  mla_context_destroy(context);
  printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
