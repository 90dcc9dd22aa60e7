// SPDX-License-Identifier: Apache-2.0
// Declares the checks of physical slots, which are page * page_size + offset, as int32.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/args.h"
#include "core/batch_checks.h"
#include "core/checks.h"

namespace mla::core {

/// Checks that the slots of all pages in use fit int32. The size of the pool is not known here.
bool check_slot_pages(Checks& check, const Pages& pages, const PagedRows& rows);

/// Checks an optional [T] input of int32. `values` stays as it is if the tensor is not given.
bool check_per_token(Checks& check, std::string_view field, const TensorView& view, int64_t num_tokens,
                     const int32_t*& values);

/// Checks a list of blocks of keys, which need not be given, and the size of blocks.
bool check_key_blocks(Checks& check, const TensorView& view, int32_t block_size, int64_t num_tokens, KeyBlocks& blocks);

/// Checks that rows may be those of a rank where an index stands for `ratio` tokens: not those of a pool.
bool check_ratio_of_rank(Checks& check, std::string_view field, const ContextParallel& share, int32_t ratio,
                         bool list_tokens);

/// Checks that a row of slots has room for all tokens of topk groups, and for those of one that is not complete.
bool check_listed(Checks& check, int64_t topk, int64_t ratio, int64_t num_slots);

/// Checks the optional [T] output of numbers of valid slots.
bool check_valid_count(Checks& check, const TensorView& valid_count, int64_t num_tokens);

}  // namespace mla::core
