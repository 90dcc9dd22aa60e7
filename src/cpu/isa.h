// SPDX-License-Identifier: Apache-2.0
// Which instruction-set levels this build holds code for.
#pragma once

#include <string_view>

namespace mla::cpu {

/// `level`: "avx512_bf16", "avx512", "avx2" or "portable".
bool built(std::string_view level);

}  // namespace mla::cpu
