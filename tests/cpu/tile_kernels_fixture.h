// SPDX-License-Identifier: Apache-2.0
// This file has what the tests of tile kernels share: random rows, and where the kernels put keys and channels.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/level_test.h"
#include "cpu/tile_kernels.h"
#include "mla/numeric.h"

namespace mla::cpu {

class TileKernelsTest : public LevelTest {
 protected:
  void SetUp() override {
    LevelTest::SetUp();
    if (IsSkipped()) return;
    kernels_ = &set_.pick(DType::kBF16, DType::kBF16);
    if (kernels_->begin != nullptr) kernels_->begin();
  }
  void TearDown() override {
    if (kernels_ != nullptr && kernels_->end != nullptr) kernels_->end();
  }

  /// Returns the type of the table's elements: bf16 for pairs, f32 otherwise.
  DType element() const { return kernels_->pack == 2 ? DType::kBF16 : DType::kF32; }
  std::vector<float> random_values(size_t count, float scale = 1.0F) {
    std::normal_distribution<float> normal(0.0F, scale);
    std::vector<float> values(count);
    for (float& value : values) value = bf16_to_f32(f32_to_bf16(normal(random_)));  // exact in either element type
    return values;
  }
  std::vector<std::byte> stored(const std::vector<float>& values) const {
    std::vector<std::byte> bytes(values.size() * size_of(element()));
    for (size_t i = 0; i < values.size(); ++i) {
      const uint16_t half = f32_to_bf16(values[i]);
      if (kernels_->pack == 2) {
        std::memcpy(&bytes[2 * i], &half, 2);
      } else {
        std::memcpy(&bytes[4 * i], &values[i], 4);
      }
    }
    return bytes;
  }
  int64_t lane_words(int64_t rows, int64_t steps) const {
    const int64_t groups = (rows + kernels_->lanes - 1) / kernels_->lanes;
    return groups * steps * kernels_->lanes;
  }

  bool whole_tiles() const { return kernels_->tile_keys > 1; }
  /// Returns how many steps P of so many keys has room for.
  int32_t padded_steps(int32_t num_keys) const {
    const int32_t steps = (num_keys + kernels_->pack - 1) / kernels_->pack;
    return (steps + kernels_->tile_keys - 1) / kernels_->tile_keys * kernels_->tile_keys;
  }
  /// Returns where a group's P has the step of a row.
  size_t place_of(int32_t step, int32_t lane) const {
    const int32_t lanes = kernels_->lanes, tile = kernels_->tile_keys;
    return static_cast<size_t>(whole_tiles() ? (step / tile * lanes + lane) * tile + step % tile : step * lanes + lane);
  }
  /// Says in which step, and in which half of it, P and v have a key.
  struct KeyPlace {
    int32_t step, half;
  };
  KeyPlace key_place(int32_t key) const {
    const int32_t tile = kernels_->tile_keys;
    if (whole_tiles()) return {key / (2 * tile) * tile + key % tile, key / tile % 2};
    return {key / kernels_->pack, key % kernels_->pack};
  }
  float probability(const std::vector<uint32_t>& p, int32_t key, int32_t lane) const {
    const KeyPlace place = key_place(key);
    const uint32_t word = p[place_of(place.step, lane)];
    if (kernels_->pack == 1) return std::bit_cast<float>(word);
    return bf16_to_f32(static_cast<uint16_t>(word >> (16 * place.half)));
  }
  /// Returns where v and o have a channel of a slab.
  size_t position(int32_t channel) const {
    return static_cast<size_t>(kernels_->slab_positions != nullptr ? kernels_->slab_positions[channel] : channel);
  }

  const TileKernels* kernels_ = nullptr;
  std::mt19937 random_{42};
};

}  // namespace mla::cpu
