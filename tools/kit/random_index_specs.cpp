// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kit/random_parts.h"

namespace mla::kit {

BlockTableToCsrSpec random_block_table_to_csr_spec(uint64_t seed) {
  Random random(mix(seed, 0xB70C));
  BlockTableToCsrSpec spec;
  spec.seed = seed;
  spec.page_size = random_page_size(random);
  spec.kv_len.clear();
  const int32_t batch_size = random.chance(0.1) ? 1024 : random_batch(random);
  for (int32_t request = 0; request < batch_size; ++request)
    spec.kv_len.push_back(random_kv_len(random, spec.page_size));
  spec.garbage_columns = static_cast<int32_t>(random.integer(0, 3));
  spec.row_extra = random_extra(random);
  return spec;
}

PhysicalSlotsSpec random_physical_slots_spec(uint64_t seed) {
  Random random(mix(seed, 0x9510));
  PhysicalSlotsSpec spec;
  spec.seed = seed;
  spec.page_size = random_page_size(random);
  const Batch batch = random_requests(random, 64, spec.page_size);
  spec.q_len = batch.q_len;
  spec.kv_len = batch.kv_len;
  spec.omit_qo_indptr = batch.omit_qo_indptr;
  spec.topk = pick(random, std::array<int32_t, 8>{1, 3, 16, 64, 100, 512, 2048, 2176});
  spec.topk_length = random.chance(0.5);
  spec.block_table = random.chance(0.5);
  if (spec.block_table) spec.table_row_extra = random_extra(random);
  if (random.chance(0.4)) spec.context_parallel = random_context_parallel(random);
  if (random.chance(0.3)) {
    spec.list_tokens = true;
    spec.ratio = pick(random, std::array<int32_t, 4>{1, 2, 4, 7});
    spec.topk = std::min(spec.topk, 512);
    spec.slots_columns = static_cast<int32_t>(random.integer(0, 2) * random.integer(0, 130));
  } else if (spec.context_parallel.world == 1 && random.chance(0.3)) {
    spec.ratio = pick(random, std::array<int32_t, 4>{2, 4, 5, 128});
  }
  spec.compact = random.chance(0.5);
  spec.in_place = !spec.list_tokens && random.chance(0.4);
  spec.want_valid_count = random.chance(0.7);
  spec.invalid_share = pick(random, std::array<double, 4>{0.0, 0.2, 0.9, 1.0});
  spec.row_extra = random_extra(random);
  spec.slots_extra = random_extra(random);
  return spec;
}

AppendIndexerSpec random_append_indexer_spec(uint64_t seed) {
  Random random(mix(seed, 0xA1D8));
  AppendIndexerSpec spec;
  spec.seed = seed;
  spec.page_size = random_page_size(random);
  spec.num_pages = static_cast<int32_t>(random.integer(1, std::max(2, 512 / spec.page_size)));
  spec.num_tokens = static_cast<int32_t>(random.integer(0, int64_t{spec.num_pages} * spec.page_size));
  spec.page_stride_extra = random_extra(random);
  spec.dtype = random_float(random);
  spec.power_of_two_scales = random.chance(0.5);
  spec.skip_share = pick(random, std::array<double, 3>{0.0, 0.1, 0.9});
  spec.special_share = pick(random, std::array<double, 3>{0.0, 0.2, 1.0});
  spec.row_extra = random_extra(random);
  if (random.chance(0.5)) {
    spec.format = IndexerFormat::kMXFP4;
    spec.power_of_two_scales = true;
  }
  return spec;
}

IndexerLogitsSpec random_indexer_logits_spec(uint64_t seed) {
  Random random(mix(seed, 0x106175));
  IndexerLogitsSpec spec;
  spec.seed = seed;
  spec.num_heads = pick(random, std::array<int32_t, 8>{1, 2, 7, 16, 32, 64, 64, 65});
  spec.page_size = random_page_size(random);
  Batch batch = random_requests(random, spec.num_heads, spec.page_size);
  limit_work(batch.kv_len, batch.q_len, spec.num_heads, kIndexerLayout.head_dim, kUsualWork);
  spec.q_len = batch.q_len;
  spec.kv_len = batch.kv_len;
  spec.omit_qo_indptr = batch.omit_qo_indptr;
  spec.q_dtype = random.chance(0.5) ? DType::kE4M3 : random_float(random);
  spec.block_table = random.chance(0.5);
  if (spec.block_table) spec.table_row_extra = random_extra(random);
  spec.causal = random.chance(0.8);
  if (random.chance(0.3)) spec.ratio = pick(random, std::array<int32_t, 5>{2, 3, 4, 4, 128});
  if (random.chance(0.3)) {
    spec.key_begin = random.chance(0.7);
    spec.key_end = !spec.key_begin || random.chance(0.7);
  }
  if (random.chance(0.4)) {
    spec.block_size = pick(random, std::array<int32_t, 6>{1, 3, 8, 8, 16, 100});
    spec.num_blocks = pick(random, std::array<int32_t, 5>{1, 5, 16, 40, 200});
    while (spec.num_blocks > 1 && spec.num_blocks * spec.block_size > 2000) spec.num_blocks /= 2;
    spec.wild_share = pick(random, std::array<double, 4>{0.0, 0.0, 0.2, 1.0});
  }
  spec.unowned_pages = static_cast<int32_t>(random.integer(0, 3));
  spec.page_stride_extra = random_extra(random);
  spec.q_head_extra = random_extra(random);
  spec.q_token_extra = random_extra(random);
  spec.weights_extra = random_extra(random);
  spec.logits_columns = random_extra(random);
  spec.logits_extra = random_extra(random);
  if (random.chance(0.5)) spec.format = IndexerFormat::kMXFP4;
  if (random.chance(0.4)) spec.compute = Compute::kExact;
  if (random.chance(0.5)) spec.logits_dtype = random.chance(0.5) ? DType::kBF16 : DType::kF16;
  return spec;
}

TopKSpec random_top_k_spec(uint64_t seed) {
  Random random(mix(seed, 0x709));
  TopKSpec spec;
  spec.seed = seed;
  spec.num_tokens = static_cast<int32_t>(random.chance(0.05) ? 0 : random.integer(1, 20));
  spec.num_logits = static_cast<int32_t>(random.chance(0.2)   ? random.integer(3000, 70000)
                                         : random.chance(0.1) ? 1
                                                              : random.integer(1, 3000));
  if (spec.num_logits > 3000) spec.num_tokens = std::min(spec.num_tokens, 2);
  spec.k = pick(random, std::array<int32_t, 10>{1, 2, 7, 64, 100, 512, 1024, 2048, 2048, 2176});
  spec.lengths = random.chance(0.6);
  if (random.chance(0.5)) spec.block_size = pick(random, std::array<int32_t, 6>{2, 3, 8, 8, 8, 500});
  if (random.chance(0.3))
    spec.num_blocks =
        std::max<int32_t>(spec.num_logits / spec.block_size + static_cast<int32_t>(random.integer(-1, 1)), 1);
  spec.starts = spec.num_blocks == 0 && spec.block_size == 1 && random.chance(0.5);
  spec.levels = pick(random, std::array<int32_t, 5>{0, 0, 1, 3, 100});
  spec.nan_share = pick(random, std::array<double, 4>{0.0, 0.0, 0.1, 0.9});
  spec.infinite_share = pick(random, std::array<double, 4>{0.0, 0.0, 0.1, 0.9});
  spec.logits_extra = random_extra(random);
  spec.indices_extra = random_extra(random);
  if (random.chance(0.5)) spec.logits_dtype = random.chance(0.5) ? DType::kBF16 : DType::kF16;
  return spec;
}

IndexerTopKSpec random_indexer_top_k_spec(uint64_t seed) {
  Random random(mix(seed, 0x1067709));
  IndexerTopKSpec spec;
  spec.indexer = random_indexer_logits_spec(seed);
  spec.topk = pick(random, std::array<int32_t, 7>{1, 3, 16, 64, 500, 512, 2048});
  spec.page_size = random_page_size(random);
  spec.want_valid_count = random.chance(0.7);
  spec.slots_extra = random_extra(random);
  if (spec.indexer.block_table) spec.table_row_extra = random_extra(random);
  spec.list_tokens = spec.indexer.causal && !spec.indexer.key_end && random.chance(0.3);
  if (spec.list_tokens) spec.topk = std::min(spec.topk, 500);
  if ((spec.indexer.ratio == 1 || spec.list_tokens) && random.chance(0.4))
    spec.context_parallel = random_context_parallel(random);
  spec.slots_columns = static_cast<int32_t>(random.integer(0, 2) * random.integer(0, 130));
  return spec;
}

}  // namespace mla::kit
