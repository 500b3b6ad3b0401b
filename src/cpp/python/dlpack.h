// The part of DLPack's binary interface that describes a tensor in this process (https://dmlc.github.io/dlpack).
#pragma once

#include <cstdint>

namespace loraaccel::dlpack {

constexpr const char* kCapsule = "dltensor";
constexpr int32_t kCPU = 1;

enum Code : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4 };

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  bool operator==(const DataType&) const = default;
};

struct Tensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: dense
  uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor* self);
};

}  // namespace loraaccel::dlpack
