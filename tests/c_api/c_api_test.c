/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI from C: every operation against values computed here, and its errors. */
#include <math.h>
#include <stddef.h>
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
static const mla_dtype kU8 = {MLA_DTYPE_UINT, 8, 1};
static const mla_dtype kE4m3 = {MLA_DTYPE_E4M3FN, 8, 1};
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

  mla_tensor over_q = p.o_tensor;
  over_q.data = p.q;
  over_q.byte_offset = sizeof(float);
  parts.o = &over_q;
  static float q[kTokens * kHeads * kQk];
  memcpy(q, p.q, sizeof q);
  CHECK_ERROR(mla_decode_run(context, plan, &parts), MLA_INVALID_ARGUMENT,
              "decode: o: expected memory apart from that of q_nope, got ranges with 6144 bytes in common");
  CHECK(memcmp(q, p.q, sizeof q) == 0);  // NOLINT(bugprone-suspicious-memory-comparison): the same bits

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

/* The options of decode, by what they must do to the result without them. */
static void test_decode_options(const mla_context* context) {
  static problem p;
  fill(&p);
  size_t size = 0;
  mla_plan* plan = NULL;
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_OK);
  void* workspace = malloc(size + 1);
  CHECK(mla_decode_plan(context, &p.params, workspace, size, &plan) == MLA_OK);
  CHECK(mla_decode_run(context, plan, &p.params) == MLA_OK);
  static float plain[kTokens * kHeads * kCkv];
  memcpy(plain, p.o, sizeof plain);

  /* A sink as heavy as all keys together halves the output. */
  int64_t heads[] = {kHeads};
  float sink[kHeads];
  mla_tensor tsink = tensor(sink, kF32, 1, heads);
  for (int head = 0; head < kHeads; ++head) sink[head] = p.lse[head];
  p.params.options.attn_sink = &tsink;
  CHECK(mla_decode_run(context, plan, &p.params) == MLA_OK);
  for (size_t d = 0; d < (size_t)kHeads * kCkv; ++d) CHECK(fabsf(p.o[d] - plain[d] / 2) < 4e-3F);
  mla_plan_destroy(plan);

  /* A window of the query's own position: the value of that one key. Both forms of a tree of two roots do the same. */
  uint8_t mask[kTokens * kTokens] = {1, 0, 0, 1};
  int32_t parents[kTokens] = {-1, -1};
  int64_t mask_shape[] = {kTokens, kTokens}, parents_shape[] = {kTokens};
  mla_tensor tmask = tensor(mask, kU8, 2, mask_shape), tparents = tensor(parents, kI32, 1, parents_shape);
  for (int form = 0; form < 3; ++form) {
    fill(&p);
    p.params.options.has_window = 1;
    if (form == 1) p.params.tree_mask = &tmask;
    if (form == 2) p.params.tree_parents = &tparents;
    CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_OK);
    workspace = realloc(workspace, size + 1);
    CHECK(mla_decode_plan(context, &p.params, workspace, size, &plan) == MLA_OK);
    CHECK(mla_decode_run(context, plan, &p.params) == MLA_OK);
    for (int query = 0; query < kTokens; ++query)
      for (int d = 0; d < kCkv; ++d)
        CHECK(fabsf(p.o[(size_t)query * kHeads * kCkv + (size_t)d] -
                    from_bf16(cache_row(&p, kKeys - kTokens + query)[d])) < 1e-6F);
    mla_plan_destroy(plan);
  }

  /* Ranks that share the keys: merged, their states are the whole again. */
  static float states[2 * kTokens * kHeads * kCkv], lses[2 * kTokens * kHeads];
  static problem whole;
  fill(&whole);
  for (int rank = 0; rank < 2; ++rank) {
    fill(&p);
    /* Token i lives on rank i / kPageSize % 2: pages 0 and 2 of the request, or page 1. */
    p.params.context_parallel.rank = rank;
    p.params.context_parallel.world = 2;
    p.params.context_parallel.interleave = kPageSize;
    if (rank == 0) {
      p.table[1] = whole.table[2];
    } else {
      p.table[0] = whole.table[1];
    }
    p.o_tensor.data = states + (size_t)rank * kTokens * kHeads * kCkv;
    p.lse_tensor.data = lses + (size_t)rank * kTokens * kHeads;
    CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_OK);
    workspace = realloc(workspace, size + 1);
    CHECK(mla_decode_plan(context, &p.params, workspace, size, &plan) == MLA_OK);
    CHECK(mla_decode_run(context, plan, &p.params) == MLA_OK);
    mla_plan_destroy(plan);
  }
  int64_t states_shape[] = {2, kTokens, kHeads, kCkv}, lses_shape[] = {2, kTokens, kHeads};
  mla_tensor tstates = tensor(states, kF32, 4, states_shape), tlses = tensor(lses, kF32, 3, lses_shape);
  mla_merge_states_params merge = mla_merge_states_params_init();
  merge.partial_o = &tstates;
  merge.partial_lse = &tlses;
  merge.o = &whole.o_tensor;
  merge.lse = &whole.lse_tensor;
  CHECK(mla_merge_states_run(context, &merge) == MLA_OK);
  for (int query = 0; query < kTokens; ++query)
    for (int head = 0; head < kHeads; ++head) expect_query(&whole, query, head);
  free(workspace);
}

/* Two equal queries over slots 3, 1 and an extra pool's slot 0 in fp8: every key scores 0, so that o is their mean. */
static void test_decode_sparse(const mla_context* context) {
  enum { kWidth = 256 };
  static float q[2 * kWidth], o[2 * kWidth], lse[2];
  static uint8_t codes[4 * kWidth];
  for (size_t i = 0; i < sizeof codes; ++i) codes[i] = i / kWidth == 1 ? 0x38 : 0x40; /* 1 in slot 1, else 2 */
  float scale[] = {0.5F};
  int32_t indices[] = {3, -1, 1, 99, 3, 1, 1, 1}, lengths[] = {4, 2}, extra[] = {0, 0};
  int64_t one[] = {1}, q_shape[] = {2, 1, kWidth}, cache_shape[] = {2, 2, kWidth}, lse_shape[] = {2, 1};
  int64_t indices_shape[] = {2, 4}, lengths_shape[] = {2}, extra_shape[] = {2, 1};
  mla_tensor tq = tensor(q, kF32, 3, q_shape), to = tensor(o, kF32, 3, q_shape), tlse = tensor(lse, kF32, 2, lse_shape);
  mla_tensor tcache = tensor(codes, kE4m3, 3, cache_shape), tscale = tensor(scale, kF32, 1, one);
  mla_tensor tindices = tensor(indices, kI32, 2, indices_shape), tlengths = tensor(lengths, kI32, 1, lengths_shape);
  mla_tensor textra = tensor(extra, kI32, 2, extra_shape);
  mla_decode_sparse_params params = mla_decode_sparse_params_init();
  params.q = &tq;
  params.pool.cache.format = MLA_CACHE_FP8;
  params.pool.cache.kv = &tcache;
  params.pool.scales.ckv_scale = &tscale;
  params.extra_pool = params.pool;
  params.pool.indices = &tindices;
  params.pool.topk_length = &tlengths;
  params.extra_pool.indices = &textra;
  params.sm_scale = 1.0F;
  params.o = &to;
  params.lse = &tlse;
  size_t size = 0;
  mla_plan* plan = NULL;
  CHECK(mla_decode_sparse_workspace_size(context, &params, &size) == MLA_OK);
  void* workspace = malloc(size + 1);
  CHECK(mla_decode_sparse_plan(context, &params, workspace, size, &plan) == MLA_OK);
  CHECK(mla_decode_sparse_run(context, plan, &params) == MLA_OK);
  /* Slots 3 and 1, then 3 and 1 again (of its first two), and 0 of the other pool: 1, 0.5 and 1. */
  for (int query = 0; query < 2; ++query) {
    for (int d = 0; d < kWidth; ++d) CHECK(fabsf(o[query * kWidth + d] - 2.5F / 3.0F) < 4e-3F);
    CHECK(fabsf(lse[query] - logf(3.0F)) < 1e-4F);
  }
  mla_plan_destroy(plan);
  free(workspace);
  int32_t starts[] = {0, 2, 2};
  int64_t starts_shape[] = {3};
  mla_tensor tstarts = tensor(starts, kI32, 1, starts_shape);
  params.qo_indptr = &tstarts;
  params.extra_pool.topk_length = &tlengths;
  params.extra_topk_length_per = MLA_LENGTH_PER_REQUEST;
  CHECK_ERROR(mla_decode_sparse_workspace_size(context, &params, &size), MLA_INVALID_ARGUMENT,
              "decode_sparse: pool.topk_length_per: expected token or request, since qo_indptr is given and T = B = 2, "
              "got none");
  params.topk_length_per = 256;
  CHECK_ERROR(mla_decode_sparse_workspace_size(context, &params, &size), MLA_INVALID_ARGUMENT,
              "decode_sparse: pool.topk_length_per: expected by shape, token or request, got unknown value 255");
  params.topk_length_per = MLA_LENGTH_PER_TOKEN;
  CHECK(mla_decode_sparse_workspace_size(context, &params, &size) == MLA_OK);
  params.struct_size = offsetof(mla_decode_sparse_params, topk_length_per); /* the version before knows shapes only */
  CHECK(mla_decode_sparse_workspace_size(context, &params, &size) == MLA_INVALID_ARGUMENT);
  params.struct_size = sizeof params;
  params.pool.cache.page_size = 7;
  CHECK_ERROR(mla_decode_sparse_workspace_size(context, &params, &size), MLA_INVALID_ARGUMENT,
              "decode_sparse: pool.cache.page_size: expected 0 or 2, as the shape says, got 7");
  params.pool.cache.page_size = 0;
  params.extra_pool.scales.ckv_scale = &tcache;
  CHECK_ERROR(mla_decode_sparse_workspace_size(context, &params, &size), MLA_INVALID_ARGUMENT,
              "decode_sparse: extra_pool.scales.ckv_scale: expected f32, got e4m3");
  params.extra_pool.scales.ckv_scale = &tscale;
  tindices.dtype.lanes = 2;
  CHECK_ERROR(mla_decode_sparse_workspace_size(context, &params, &size), MLA_INVALID_ARGUMENT,
              "decode_sparse: pool.indices: expected an element type of mla_dtype_code, got code 0, 32 bits, 2 lanes");
}

static void test_prefill_sparse(const mla_context* context) {
  enum { kQkWidth = 320, kValue = 256 };
  static float q[kQkWidth], o[kValue], lse[1], max_logits[1];
  static uint16_t kv[3 * kQkWidth];
  for (size_t i = 0; i < kQkWidth; ++i) q[i] = value_at(i);
  for (size_t i = 0; i < 3 * kQkWidth; ++i) kv[i] = to_bf16(value_at(i + 3));
  int32_t indices[] = {5, 2};
  int64_t q_shape[] = {1, 1, kQkWidth}, kv_shape[] = {3, kQkWidth}, o_shape[] = {1, 1, kValue};
  int64_t indices_shape[] = {1, 2}, lse_shape[] = {1, 1};
  mla_tensor tq = tensor(q, kF32, 3, q_shape), tkv = tensor(kv, kBf16, 2, kv_shape), to = tensor(o, kF32, 3, o_shape);
  mla_tensor tindices = tensor(indices, kI32, 2, indices_shape), tlse = tensor(lse, kF32, 2, lse_shape);
  mla_tensor tmax = tensor(max_logits, kF32, 2, lse_shape);
  mla_prefill_sparse_params params = mla_prefill_sparse_params_init();
  params.q = &tq;
  params.kv = &tkv;
  params.indices = &tindices;
  params.sm_scale = 0.125F;
  params.o = &to;
  params.max_logits = &tmax;
  params.lse = &tlse;
  size_t size = 0;
  mla_plan* plan = NULL;
  CHECK(mla_prefill_sparse_workspace_size(context, &params, &size) == MLA_OK);
  void* workspace = malloc(size + 1);
  CHECK(mla_prefill_sparse_plan(context, &params, workspace, size, &plan) == MLA_OK);
  CHECK(mla_prefill_sparse_run(context, plan, &params) == MLA_OK);
  double score = 0.0; /* of the one row that exists */
  for (int d = 0; d < kQkWidth; ++d) score += 0.125 * (double)q[d] * from_bf16(kv[2 * kQkWidth + d]);
  CHECK(fabs(max_logits[0] - score) < 1e-2);
  CHECK(fabs(lse[0] - score) < 1e-2);
  for (int d = 0; d < kValue; ++d) CHECK(fabsf(o[d] - from_bf16(kv[2 * kQkWidth + d])) < 1e-6F);
  mla_plan_destroy(plan);
  free(workspace);
}

/* A key rotated by a right angle into an fp8_ds_mla page, then copied into bf16. */
static void test_writers(const mla_context* context) {
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

/* Requests of 3 and 2 tokens in pages of 2. */
static void test_index_tools(const mla_context* context) {
  int32_t table[] = {4, 7, 2, 9}, kv_len[] = {3, 2}, indptr[3], pages[3];
  int64_t table_shape[] = {2, 2}, two[] = {2}, three[] = {3};
  mla_tensor ttable = tensor(table, kI32, 2, table_shape), tlen = tensor(kv_len, kI32, 1, two);
  mla_tensor tindptr = tensor(indptr, kI32, 1, three), tpages = tensor(pages, kI32, 1, three);
  mla_block_table_to_csr_params csr = mla_block_table_to_csr_params_init();
  csr.block_table = &ttable;
  csr.kv_len = &tlen;
  csr.page_size = 2;
  csr.kv_indptr = &tindptr;
  csr.kv_indices = &tpages;
  CHECK(mla_block_table_to_csr_run(context, &csr) == MLA_OK);
  CHECK(indptr[0] == 0 && indptr[1] == 2 && indptr[2] == 3);
  CHECK(pages[0] == 4 && pages[1] == 7 && pages[2] == 2);

  int32_t indices[] = {-1, 2, 1, 2}, slots[4], valid[2];
  int64_t indices_shape[] = {2, 2};
  mla_tensor tindices = tensor(indices, kI32, 2, indices_shape), tslots = tensor(slots, kI32, 2, indices_shape);
  mla_tensor tvalid = tensor(valid, kI32, 1, two);
  mla_physical_slots_params physical = mla_physical_slots_params_init();
  physical.indices = &tindices;
  physical.pages.kv_indptr = &tindptr;
  physical.pages.kv_indices = &tpages;
  physical.pages.kv_len = &tlen;
  physical.page_size = 2;
  physical.slots = &tslots;
  physical.valid_count = &tvalid;
  CHECK(mla_physical_slots_run(context, &physical) == MLA_OK);
  CHECK(slots[0] == -1 && slots[1] == 14 && slots[2] == 5 && slots[3] == -1);
  CHECK(valid[0] == 1 && valid[1] == 1);
  physical.compact = 1;
  CHECK(mla_physical_slots_run(context, &physical) == MLA_OK);
  CHECK(slots[0] == 14 && slots[1] == -1);

  float logits[] = {1.0F, 3.0F, 3.0F, 2.0F};
  int32_t best[3], length[] = {3};
  int64_t logits_shape[] = {1, 4}, best_shape[] = {1, 3}, one[] = {1};
  mla_tensor tlogits = tensor(logits, kF32, 2, logits_shape), tbest = tensor(best, kI32, 2, best_shape);
  mla_tensor tlength = tensor(length, kI32, 1, one);
  mla_top_k_params top = mla_top_k_params_init();
  top.logits = &tlogits;
  top.indices = &tbest;
  CHECK(mla_top_k_run(context, &top) == MLA_OK);
  CHECK(best[0] == 1 && best[1] == 2 && best[2] == 3);
  top.lengths = &tlength;
  length[0] = 2;
  CHECK(mla_top_k_run(context, &top) == MLA_OK);
  CHECK(best[0] == 0 && best[1] == 1 && best[2] == -1);
}

/* Keys that are unit vectors times their position, seen by a query of ones. */
static void test_indexer(const mla_context* context) {
  static uint8_t cache[2 * 2 * 132];
  static float keys[3 * 128], q[2 * 128];
  int64_t slots[] = {2, 3, 0};
  int64_t keys_shape[] = {3, 128}, slots_shape[] = {3}, cache_shape[] = {2, 2 * 132};
  for (int t = 0; t < 3; ++t) keys[t * 128 + t] = (float)(4 >> t); /* 4, 2, 1 */
  mla_tensor tkeys = tensor(keys, kF32, 2, keys_shape), tslots = tensor(slots, kI64, 1, slots_shape);
  mla_tensor tcache = tensor(cache, kU8, 2, cache_shape);
  mla_append_indexer_params append = mla_append_indexer_params_init();
  append.k = &tkeys;
  append.slot_mapping = &tslots;
  append.cache.kv = &tcache;
  append.cache.page_size = 2;
  CHECK(mla_append_indexer_run(context, &append) == MLA_OK);

  for (int i = 0; i < 2 * 128; ++i) q[i] = 1.0F;
  float weights[] = {0.5F, 0.5F}, row[2 * 3];
  int32_t table[] = {1, 0}, kv_len[] = {3};
  int64_t q_shape[] = {2, 1, 128}, weights_shape[] = {2, 1}, table_shape[] = {1, 2}, one[] = {1}, row_shape[] = {2, 3};
  mla_tensor tq = tensor(q, kF32, 3, q_shape), tweights = tensor(weights, kF32, 2, weights_shape);
  mla_tensor ttable = tensor(table, kI32, 2, table_shape), tlen = tensor(kv_len, kI32, 1, one);
  mla_tensor trow = tensor(row, kF32, 2, row_shape);
  mla_indexer_logits_params logits = mla_indexer_logits_params_init();
  logits.q = &tq;
  logits.weights = &tweights;
  logits.cache = append.cache;
  logits.pages.block_table = &ttable;
  logits.pages.kv_len = &tlen;
  logits.logits = &trow;
  CHECK(mla_indexer_logits_run(context, &logits) == MLA_OK);
  CHECK(fabsf(row[0] - 2.0F) < 1e-5F && fabsf(row[1] - 1.0F) < 1e-5F && isinf(row[2]) && row[2] < 0.0F);
  CHECK(fabsf(row[5] - 0.5F) < 1e-5F);

  /* The latent cache has pages of 4; query 0 does not see key 2. */
  int32_t latent[] = {5}, best[2 * 2], valid[2];
  int64_t latent_shape[] = {1, 1}, best_shape[] = {2, 2}, two[] = {2};
  mla_tensor tlatent = tensor(latent, kI32, 2, latent_shape), tbest = tensor(best, kI32, 2, best_shape);
  mla_tensor tvalid = tensor(valid, kI32, 1, two);
  mla_indexer_top_k_params top = mla_indexer_top_k_params_init();
  top.q = &tq;
  top.weights = &tweights;
  top.cache = append.cache;
  top.indexer_pages = logits.pages;
  top.pages.block_table = &tlatent;
  top.pages.kv_len = &tlen;
  top.page_size = 4;
  top.logits = &trow;
  top.slots = &tbest;
  top.valid_count = &tvalid;
  CHECK(mla_indexer_top_k_run(context, &top) == MLA_OK);
  CHECK(best[0] == 20 && best[1] == 21 && best[2] == 20 && best[3] == 21);
  CHECK(valid[0] == 2 && valid[1] == 2);
  int64_t wide[] = {2, 3};
  int32_t all[2 * 3];
  tbest = tensor(all, kI32, 2, wide);
  CHECK(mla_indexer_top_k_run(context, &top) == MLA_OK);
  CHECK(all[0] == 20 && all[1] == 21 && all[2] == -1 && all[5] == 22);
  top.cache.kv = NULL;
  CHECK_ERROR(mla_indexer_top_k_run(context, &top), MLA_INVALID_ARGUMENT,
              "indexer_top_k: cache.kv: expected a tensor, got none");
  top.cache = append.cache;
  top.pages.block_table = NULL;
  CHECK_ERROR(mla_indexer_top_k_run(context, &top), MLA_INVALID_ARGUMENT,
              "indexer_top_k: pages.block_table: expected pages.block_table, or pages.kv_indptr and pages.kv_indices, "
              "got none");
  top.indexer_pages.kv_indptr = &tlen;
  CHECK_ERROR(mla_indexer_top_k_run(context, &top), MLA_INVALID_ARGUMENT,
              "indexer_top_k: indexer_pages.block_table: expected either indexer_pages.block_table or "
              "indexer_pages.kv_indptr and indexer_pages.kv_indices, got both");
  append.cache.reserved = 1;
  CHECK_ERROR(mla_append_indexer_run(context, &append), MLA_INVALID_ARGUMENT,
              "append_indexer: cache.reserved: expected 0, got 1");
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
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: lse_base: expected MLA_LSE_BASE_E or MLA_LSE_BASE_2, got 300");
  fill(&p);
  p.params.scales.ckv_scale = &p.lse_tensor;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: scales.ckv_scale: expected none for bf16, got a tensor");
  fill(&p);
  p.params.cache.format = MLA_CACHE_FP8_DS_MLA;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: q: expected shape [T, H, d_qk = 576], got [2, 3, 320]");
  fill(&p);
  p.params.cache.format = 77;
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_INVALID_ARGUMENT);
  CHECK(strstr(mla_last_error(), "decode: cache.format: expected a cache format, got unknown value") != NULL);
  fill(&p);
  p.params.scales.any_scales = 2;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: scales.any_scales: expected 0 or 1, got 2");
  fill(&p);
  p.params.options.window_left = 4;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: options.window_left: expected 0, got 4");
  fill(&p);
  p.params.options.has_window = 1;
  p.params.options.window_left = -1;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: options.window_left: expected at least 0, got -1");
  fill(&p);
  p.params.context_parallel.rank = 2;
  p.params.context_parallel.world = 2;
  CHECK_ERROR(mla_decode_workspace_size(context, &p.params, &size), MLA_INVALID_ARGUMENT,
              "decode: context_parallel.rank: expected 0 to 1, got 2");
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

  /* An older caller's: shorter, and what follows it is not read. */
  fill(&p);
  p.params.struct_size = offsetof(mla_decode_params, q_scale);
  p.params.context_parallel.rank = -7;
  p.params.options.has_window = 9;
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_OK);
  p.params.struct_size -= 1;
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_INVALID_ARGUMENT);

  /* Options and problems of before there were devices. */
  mla_context_options options = mla_context_options_init();
  mla_context* other = NULL;
  options.num_threads = 1;
  options.device = "nonsense";
  CHECK_ERROR(mla_context_create(&options, &other), MLA_INVALID_ARGUMENT,
              "context: device: expected cpu, cuda, cuda:<index> or emulated:sm<arch>, got \"nonsense\"");
  options.struct_size = offsetof(mla_context_options, device);
  CHECK(mla_context_create(&options, &other) == MLA_OK);
  mla_context_destroy(other);
  mla_problem wanted = mla_problem_init();
  wanted.device.device_type = MLA_DEVICE_CUDA;
  wanted.gpu_arch = 75;
  char text[4096];
  CHECK(mla_explain(&wanted, "auto", text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "cuda_portable: no, needs sm80 or newer, not sm75") != NULL);
  wanted.struct_size = offsetof(mla_problem, gpu_arch);
  CHECK(mla_explain(&wanted, "auto", text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "not sm75") == NULL);
  /* Problems of before they said how many queries there are. */
  wanted = mla_problem_init();
  CHECK(wanted.q_len == 1);
  wanted.device.device_type = MLA_DEVICE_CUDA;
  wanted.gpu_arch = 90;
  wanted.emulated = 1;
  wanted.num_heads = 8;
  wanted.q_len = 2;
  CHECK(mla_explain(&wanted, "auto", text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "cuda_sm90: no, takes requests of more than 16 query rows (tokens x heads), not 16") != NULL);
  wanted.struct_size = offsetof(mla_problem, q_len);
  CHECK(mla_explain(&wanted, "auto", text, sizeof text, NULL) == MLA_OK);
  CHECK(strstr(text, "not 8") != NULL);
  wanted.struct_size = sizeof wanted;
  wanted.q_len = -1;
  CHECK_ERROR(mla_explain(&wanted, "auto", text, sizeof text, NULL), MLA_INVALID_ARGUMENT,
              "explain: q_len: expected at least 0, got -1");
  wanted = mla_problem_init();
  wanted.num_heads = 0;
  memset(text, '~', sizeof text);
  CHECK_ERROR(mla_explain(&wanted, "auto", text, sizeof text, NULL), MLA_INVALID_ARGUMENT,
              "explain: num_heads: expected at least 1, got 0");
  CHECK(text[0] == '~');
  wanted = mla_problem_init();
  wanted.d_v = -1;
  CHECK_ERROR(mla_explain(&wanted, "auto", text, sizeof text, NULL), MLA_INVALID_ARGUMENT,
              "explain: d_v: expected at least 1, got -1");
}

static void test_listing(void) {
  CHECK(strchr(mla_version(), '.') != NULL);
  size_t count = 0;
  const char* name = NULL;
  for (int32_t op = MLA_DECODE; op <= MLA_INDEXER_TOP_K; ++op) {
    CHECK(mla_backend_count(op, &count) == MLA_OK);
    CHECK(count >= 1);
    CHECK(mla_backend_name(op, count - 1, &name) == MLA_OK);
    CHECK(strcmp(name, "reference") == 0);
    CHECK(mla_backend_name(op, count, &name) == MLA_INVALID_ARGUMENT);
  }
  CHECK_ERROR(mla_backend_count(15, &count), MLA_INVALID_ARGUMENT, "backend_count: op: expected 0 to 14, got 15");

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

/* Names the test first, for those who must look into its crash. */
#define RUN(test, arguments) \
  do {                       \
    printf("%s\n", #test);   \
    fflush(stdout);          \
    test arguments;          \
  } while (0)

int main(void) {
  CHECK(strcmp(mla_last_error(), "") == 0);
  mla_context_options options = mla_context_options_init();
  options.num_threads = 2;
  mla_context* context = NULL;
  CHECK(mla_context_create(&options, &context) == MLA_OK);
  CHECK(mla_context_num_threads(context) == 2);
  RUN(test_decode, (context));
  RUN(test_prefill, (context));
  RUN(test_merge_states, (context));
  RUN(test_append_and_gather, (context));
  RUN(test_decode_options, (context));
  RUN(test_decode_sparse, (context));
  RUN(test_prefill_sparse, (context));
  RUN(test_writers, (context));
  RUN(test_index_tools, (context));
  RUN(test_indexer, (context));
  RUN(test_errors, (context));
  RUN(test_struct_growth, (context));
  RUN(test_listing, ());
  mla_context_destroy(context);
  printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
