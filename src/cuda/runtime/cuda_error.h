// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime's errors in the library's words.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "mla/status.h"

namespace mla::cuda {

/// Success, or "<what>: <CUDA's description> (<its name>)". The error is cleared, unless it ended the CUDA context.
Status status_of(cudaError_t error, std::string_view what);

/// While it lives the thread's current GPU is `index`; then again the one before.
class CurrentDevice {
 public:
  explicit CurrentDevice(int32_t index) {
    error_ = cudaGetDevice(&before_);
    if (error_ != cudaSuccess || before_ == index) return;
    error_ = cudaSetDevice(index);
    changed_ = error_ == cudaSuccess;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace mla::cuda
