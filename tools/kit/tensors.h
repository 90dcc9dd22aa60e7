// SPDX-License-Identifier: Apache-2.0
// Visits every tensor of an operation's parameters, given or not, for what treats them all alike; and those that the
// operation writes, caches and what is kept between calls aside.
#pragma once

#include <string_view>
#include <type_traits>

#include "mla/fields.h"
#include "mla/params.h"

namespace mla::kit {

/// Calls f(TensorView&) for every tensor of `params`, given or not.
template <class Params, class F>
void for_each_tensor(Params& params, const F& f) {
  for_each_field(params, [&f](std::string_view, auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, TensorView>)
      f(field);
    else if constexpr (HasFields<Field>)
      for_each_tensor(field, f);
  });
}

// There is one overload per struct.

template <class F>
void for_each_output(DecodeParams& p, const F& f) {
  for (TensorView* view : {&p.o, &p.lse}) f(*view);
}

template <class F>
void for_each_output(DecodeSparseParams& p, const F& f) {
  for (TensorView* view : {&p.o, &p.finish.scale, &p.lse, &p.max_logits}) f(*view);
}

template <class F>
void for_each_output(PrefillParams& p, const F& f) {
  for (TensorView* view : {&p.o, &p.lse}) f(*view);
}

template <class F>
void for_each_output(PrefillSparseParams& p, const F& f) {
  for (TensorView* view : {&p.o, &p.max_logits, &p.lse}) f(*view);
}

template <class F>
void for_each_output(MergeStatesParams& p, const F& f) {
  for (TensorView* view : {&p.o, &p.lse}) f(*view);
}

template <class F>
void for_each_output(AppendParams&, const F&) {}

template <class F>
void for_each_output(AppendRopeParams& p, const F& f) {
  f(p.q_out);
}

template <class F>
void for_each_output(AppendIndexerParams&, const F&) {}

template <class F>
void for_each_output(CompressParams& p, const F& f) {
  f(p.latent);
  for_each_output(p.append, f);
}

template <class F>
void for_each_output(GatherParams& p, const F& f) {
  for (TensorView* view : {&p.out_kv, &p.out_ckv, &p.out_kpe}) f(*view);
}

template <class F>
void for_each_output(FinishOutputParams& p, const F& f) {
  for (TensorView* view : {&p.out, &p.finish.scale}) f(*view);
}

template <class F>
void for_each_output(IndexerLogitsParams& p, const F& f) {
  f(p.logits);
}

template <class F>
void for_each_output(TopKParams& p, const F& f) {
  f(p.indices);
}

template <class F>
void for_each_output(PhysicalSlotsParams& p, const F& f) {
  for (TensorView* view : {&p.slots, &p.valid_count}) f(*view);
}

template <class F>
void for_each_output(IndexerTopKParams& p, const F& f) {
  for (TensorView* view : {&p.indexer.logits, &p.slots, &p.valid_count}) f(*view);
}

}  // namespace mla::kit
