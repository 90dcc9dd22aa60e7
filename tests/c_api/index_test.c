/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the index tools and the indexer. */
#include "c_api_test.h"

#include <math.h>

/* Requests of 3 and 2 tokens in pages of 2. */
void test_index_tools(const mla_context* context) {
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
void test_indexer(const mla_context* context) {
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
  top.topk = 2; /* of keys 0 and 1, which both queries take, rank 1 has key 1 */
  top.context_parallel.rank = 1;
  top.context_parallel.world = 2;
  CHECK(mla_indexer_top_k_run(context, &top) == MLA_OK);
  CHECK(all[0] == 20 && all[1] == -1 && all[2] == -1 && all[3] == 20 && all[4] == -1 && valid[0] == 1);
  top.list_tokens = 1; /* a row of 3 has room for a group of 2 tokens, and one token more */
  top.ratio = 2;
  CHECK_ERROR(mla_indexer_top_k_run(context, &top), MLA_INVALID_ARGUMENT,
              "indexer_top_k: slots: expected rows of at least 5 slots, for 2 groups of 2 tokens and 1 more, got 3");
  top.topk = top.list_tokens = top.ratio = top.context_parallel.rank = top.context_parallel.world = 0;
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
  append.cache.format = 2;
  CHECK_ERROR(mla_append_indexer_run(context, &append), MLA_INVALID_ARGUMENT,
              "append_indexer: cache.format: expected a format of the indexer's keys, got unknown value 2");

  /* The same keys, whose scales are powers of two, in MXFP4. */
  static uint8_t small[2 * 2 * 68];
  int64_t small_shape[] = {2, 2 * 68};
  mla_tensor tsmall = tensor(small, kU8, 2, small_shape);
  append.cache.kv = &tsmall;
  append.cache.format = MLA_INDEXER_MXFP4;
  CHECK(mla_append_indexer_run(context, &append) == MLA_OK);
  logits.cache = append.cache;
  CHECK(mla_indexer_logits_run(context, &logits) == MLA_OK);
  CHECK(row[0] == 2.0F && row[1] == 1.0F && isinf(row[2]) && row[2] < 0.0F && row[5] == 0.5F);
  append.any_scales = 1;
  CHECK_ERROR(mla_append_indexer_run(context, &append), MLA_INVALID_ARGUMENT,
              "append_indexer: any_scales: expected powers of two for mxfp4 keys, which have no other scales, got any "
              "numbers");
}
