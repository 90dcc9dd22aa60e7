// SPDX-License-Identifier: Apache-2.0
#include "kit/case_buffers.h"

namespace mla::kit {
namespace {

class List {
 public:
  List& add(const Buffer& buffer) {
    if (buffer.data() != nullptr) buffers_.push_back(&buffer);
    return *this;
  }
  template <class... More>
  List& add(const Buffer& first, const More&... more) {
    add(first);
    return add(more...);
  }
  List& add(const std::vector<const Buffer*>& list) {
    buffers_.insert(buffers_.end(), list.begin(), list.end());
    return *this;
  }
  List& add(const TableMemory& table) { return add(table.kv_indptr, table.table, table.kv_len); }
  List& add(const PagedMemory& memory) {
    return add(static_cast<const TableMemory&>(memory))
        .add(memory.kv, memory.ckv, memory.kpe, memory.ckv_scale, memory.kpe_scale);
  }
  List& add(const AttentionMemory& memory) {
    return add(memory.q, memory.q_nope, memory.q_pe, memory.q_scale, memory.attn_sink, memory.alibi_slopes, memory.o,
               memory.o_scale, memory.lse);
  }
  List& add(const FinishMemory& finish) { return add(finish.cos_sin, finish.positions, finish.gate, finish.scale); }
  List& add(const SparseMemory& pool) { return add(pool.memory).add(pool.indices, pool.topk_length); }

  std::vector<const Buffer*> take() { return std::move(buffers_); }

 private:
  std::vector<const Buffer*> buffers_;
};

const AttentionMemory& attention(const AttentionMemory& memory) { return memory; }

}  // namespace

std::vector<const Buffer*> buffers_of(const DecodeCase& problem) {
  return List()
      .add(attention(problem))
      .add(problem.qo_indptr, problem.tree_mask, problem.tree_parents)
      .add(problem.memory)
      .take();
}

std::vector<const Buffer*> buffers_of(const DecodeSparseCase& problem) {
  List list;
  list.add(attention(problem)).add(problem.qo_indptr, problem.max_logits).add(problem.pool);
  if (problem.extra_pool.has_value()) list.add(*problem.extra_pool);
  if (problem.finish.has_value()) list.add(*problem.finish);
  return list.take();
}

std::vector<const Buffer*> buffers_of(const PrefillCase& problem) {
  return List()
      .add(attention(problem))
      .add(problem.k, problem.v, problem.k_scale, problem.v_scale, problem.qo_indptr, problem.kv_indptr)
      .take();
}

std::vector<const Buffer*> buffers_of(const PrefillSparseCase& problem) {
  return List()
      .add(attention(problem))
      .add(problem.kv, problem.indices, problem.topk_length, problem.max_logits)
      .take();
}

std::vector<const Buffer*> buffers_of(const MergeCase& problem) {
  return List().add(problem.partial_o, problem.partial_lse, problem.o, problem.lse).take();
}

std::vector<const Buffer*> buffers_of(const AppendCase& problem) {
  return List().add(problem.rows, problem.ckv_rows, problem.kpe_rows, problem.slot_mapping).add(problem.memory).take();
}

std::vector<const Buffer*> buffers_of(const AppendRopeCase& problem) {
  return List()
      .add(problem.q_nope, problem.q_pe, problem.q_out, problem.q_scale, problem.ckv_rows, problem.kpe_rows,
           problem.cos_sin, problem.positions, problem.slot_mapping)
      .add(problem.q_norm_weight, problem.norm_weight)
      .add(problem.memory)
      .take();
}

std::vector<const Buffer*> buffers_of(const GatherCase& problem) {
  return List()
      .add(problem.memory)
      .add(problem.token_start, problem.out_indptr, problem.out_kv, problem.out_ckv, problem.out_kpe)
      .take();
}

std::vector<const Buffer*> buffers_of(const CopyPagesCase& problem) {
  return List().add(problem.from).add(problem.to).add(problem.from_pages, problem.to_pages).take();
}

std::vector<const Buffer*> buffers_of(const BlockTableToCsrCase& problem) {
  return List().add(problem.block_table, problem.kv_len, problem.kv_indptr, problem.kv_indices).take();
}

std::vector<const Buffer*> buffers_of(const PhysicalSlotsCase& problem) {
  return List()
      .add(problem.indices, problem.topk_length, problem.qo_indptr, problem.slots, problem.valid_count)
      .add(problem.table)
      .take();
}

std::vector<const Buffer*> buffers_of(const AppendIndexerCase& problem) {
  return List().add(problem.rows, problem.slot_mapping, problem.memory.kv).take();
}

namespace {

List list_of(const IndexerLogitsCase& problem) {
  return List()
      .add(problem.q, problem.weights, problem.qo_indptr, problem.logits, problem.memory.kv)
      .add(problem.key_begin, problem.key_end, problem.blocks)
      .add(problem.table);
}

}  // namespace

std::vector<const Buffer*> buffers_of(const IndexerLogitsCase& problem) { return list_of(problem).take(); }

std::vector<const Buffer*> buffers_of(const TopKCase& problem) {
  return List().add(problem.logits, problem.lengths, problem.starts, problem.blocks, problem.indices).take();
}

std::vector<const Buffer*> buffers_of(const IndexerTopKCase& problem) {
  return list_of(problem.indexer).add(problem.table).add(problem.slots, problem.valid_count).take();
}

std::vector<const Buffer*> buffers_of(const CompressCase& problem) {
  return List()
      .add(problem.append ? buffers_of(*problem.append) : std::vector<const Buffer*>())
      .add(problem.kv, problem.score, problem.position_bias, problem.qo_indptr, problem.kv_len, problem.state,
           problem.state_table, problem.norm_weight, problem.latent, problem.slot_mapping, problem.cos_sin,
           problem.indexer.kv)
      .add(problem.memory)
      .take();
}

std::vector<const Buffer*> buffers_of(const FinishOutputCase& problem) {
  return List().add(problem.o, problem.out).add(problem.finish).take();
}

}  // namespace mla::kit
