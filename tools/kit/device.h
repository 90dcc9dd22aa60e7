// SPDX-License-Identifier: Apache-2.0
// Brings cases to a GPU: their memory is made on the host, copied there before an operation runs, and copied back
// afterwards, guard zones and all. Where a device's memory is the host's, an emulated GPU's too, nothing is copied.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kit/buffer.h"
#include "kit/tensors.h"
#include "mla/backend.h"
#include "mla/device.h"
#include "mla/status.h"

namespace mla::kit {

/// Returns the problem as a context of that device sees it: "" or "cpu", "cuda:1", "emulated:sm90"; "sm90" is a GPU of
/// an architecture that need not be there.
Problem on_device(Problem problem, std::string_view device);

/// Returns whether the row of that name is for tensors on GPUs.
bool is_gpu_backend(std::string_view name);
/// Returns the names of the backends that are for GPUs of an architecture, in the order of the tables.
std::vector<std::string> gpu_backends(int32_t arch);
/// Returns the architecture of a GPU, "emulated:sm90" or "cuda:0"; 0 if it is not there.
int32_t arch_of(std::string_view device);

/// Holds copies of Buffers in a GPU's memory, and frees them with itself.
class DeviceImage {
 public:
  /// Copies `buffers` to `device`, which is named as in ContextOptions. Where nothing is to be copied, the image is
  /// empty.
  static Result<DeviceImage> create(const std::string& device, const std::vector<const Buffer*>& buffers);
  DeviceImage(DeviceImage&&) noexcept = default;
  DeviceImage& operator=(DeviceImage&& other) noexcept;
  ~DeviceImage();

  /// Returns whether there are copies at all.
  bool moves() const { return gpu_.has_value(); }
  const Gpu* gpu() const { return gpu_ ? &*gpu_ : nullptr; }
  size_t bytes() const;  ///< of all copies
  /// Copies one more Buffer. Its memory must live as long as the image; the Buffer may be moved.
  Status add(const Buffer& buffer);

  /// Returns the same parameters over the copies.
  template <class Params>
  Params there(Params params) const {
    if (moves()) for_each_tensor(params, [this](TensorView& view) { move(view); });
    return params;
  }
  std::span<std::byte> there(const Buffer& buffer) const;

  /// Waits for the default stream, then copies the buffers back, guard zones too.
  Status fetch(const std::vector<const Buffer*>& buffers) const;
  Status fetch() const;  ///< copies all buffers back

 private:
  struct Copy {
    std::span<std::byte> host;  // with guard zones
    std::byte* memory;
  };
  DeviceImage() = default;
  void move(TensorView& view) const;
  const Copy* find(const Buffer& buffer) const;

  std::optional<Gpu> gpu_;
  std::vector<Copy> copies_;
};

/// Remembers what Buffers hold, to see whether an operation wrote where it may only read.
class Fingerprint {
 public:
  /// Remembers all buffers but `outputs`; guard zones count.
  Fingerprint(std::vector<const Buffer*> buffers, const std::vector<const Buffer*>& outputs);
  bool holds() const;

 private:
  uint64_t now() const;
  std::vector<const Buffer*> buffers_;
  uint64_t before_;
};

}  // namespace mla::kit
