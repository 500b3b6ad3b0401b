#include "adapters/made_tensor.h"

#include <cmath>
#include <cstring>
#include <new>

#include "adapters/numbers.h"
#include "half.h"

namespace loraaccel {
namespace {

bool store(FileDType dtype, double value, char* to, double* stored) {
  switch (dtype) {
    case FileDType::kF64:
      std::memcpy(to, &value, sizeof value);
      *stored = value;
      return true;
    case FileDType::kF32: {
      const auto v = static_cast<float>(value);
      std::memcpy(to, &v, sizeof v);
      *stored = v;
      return true;
    }
    case FileDType::kF16: {
      Float16 v;
      from_float(value, &v);
      std::memcpy(to, &v, sizeof v);
      *stored = to_float(v);
      return true;
    }
    case FileDType::kBF16: {
      BFloat16 v;
      from_float(value, &v);
      std::memcpy(to, &v, sizeof v);
      *stored = to_float(v);
      return true;
    }
    default:
      return false;
  }
}

size_t element_bytes(FileDType dtype) { return static_cast<size_t>(file_dtype_bits(dtype)) / 8; }

Status unsupported(const AdapterTensor& tensor) {
  return Status(StatusCode::kUnsupportedDtype,
                tensor.key + " is " + file_dtype_name(tensor.dtype) +
                    ", expected F64, F32, F16 or BF16 to compute with");
}

}  // namespace

Status make_tensor(AdapterRole role, FileDType dtype, std::vector<int64_t> shape,
                   AdapterTensor* tensor, char** data) {
  *tensor = AdapterTensor();
  tensor->role = role;
  tensor->dtype = dtype;
  tensor->shape = std::move(shape);
  const uint64_t bytes = tensor->size_bytes();
  std::shared_ptr<char[]> memory(new (std::nothrow) char[bytes == 0 ? 1 : bytes]());
  if (memory == nullptr)
    return Status(StatusCode::kOutOfMemory,
                  "no memory for a tensor of " + std::to_string(bytes) + " bytes");
  *data = memory.get();
  tensor->data = memory.get();
  tensor->owner = std::move(memory);
  return Status();
}

Status make_number(AdapterRole role, FileDType dtype, double value, AdapterTensor* tensor) {
  for (const FileDType type : {dtype, FileDType::kF32, FileDType::kF64}) {
    char* data = nullptr;
    LORAACCEL_RETURN_IF_ERROR(make_tensor(role, type, {}, tensor, &data));
    double stored = 0;
    if (store(type, value, data, &stored) && stored == value) return Status();
  }
  return Status();
}

AdapterTensor reshaped(const AdapterTensor& tensor, std::vector<int64_t> shape) {
  AdapterTensor result = tensor;
  result.shape = std::move(shape);
  return result;
}

Status rows_of_tensor(const AdapterTensor& tensor, const std::vector<RowRun>& runs,
                      AdapterTensor* part) {
  const uint64_t row_bytes =
      tensor.shape[0] == 0 ? 0 : tensor.size_bytes() / static_cast<uint64_t>(tensor.shape[0]);
  int64_t rows = 0;
  bool together = true;
  for (const RowRun& run : runs) {
    if (run.row != runs[0].row + rows) together = false;
    rows += run.rows;
  }
  std::vector<int64_t> shape = tensor.shape;
  shape[0] = rows;
  const char* from = static_cast<const char*>(tensor.data);
  if (together) {
    *part = reshaped(tensor, std::move(shape));
    part->data = from + static_cast<uint64_t>(runs[0].row) * row_bytes;
    return Status();
  }
  char* to = nullptr;
  LORAACCEL_RETURN_IF_ERROR(make_tensor(tensor.role, tensor.dtype, std::move(shape), part, &to));
  part->key = tensor.key;
  for (const RowRun& run : runs) {
    const uint64_t bytes = static_cast<uint64_t>(run.rows) * row_bytes;
    std::memcpy(to, from + static_cast<uint64_t>(run.row) * row_bytes, bytes);
    to += bytes;
  }
  return Status();
}

Status scaled(const AdapterTensor& tensor, double factor, AdapterTensor* result, int64_t* inexact) {
  char* to = nullptr;
  LORAACCEL_RETURN_IF_ERROR(make_tensor(tensor.role, tensor.dtype, tensor.shape, result, &to));
  result->key = tensor.key;
  const size_t size = element_bytes(tensor.dtype);
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    double value = 0;
    double stored = 0;
    if (!element_value(tensor.dtype, tensor.data, i, &value) ||
        !store(tensor.dtype, value * factor, to + static_cast<size_t>(i) * size, &stored))
      return unsupported(tensor);
    if (stored != value * factor && value == value) ++*inexact;
  }
  return Status();
}

Status converted(const AdapterTensor& tensor, FileDType dtype, AdapterTensor* result) {
  char* to = nullptr;
  LORAACCEL_RETURN_IF_ERROR(make_tensor(tensor.role, dtype, tensor.shape, result, &to));
  result->key = tensor.key;
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    double value = 0;
    double stored = 0;
    if (!element_value(tensor.dtype, tensor.data, i, &value) ||
        !store(dtype, value, to + static_cast<size_t>(i) * element_bytes(dtype), &stored))
      return unsupported(tensor);
  }
  return Status();
}

}  // namespace loraaccel
