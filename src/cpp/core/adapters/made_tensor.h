// Tensors that a conversion makes, and pieces of given ones.
#pragma once

#include "loraaccel/adapter.h"

namespace loraaccel {

// Zeros; *data is where they are written. kOutOfMemory for what cannot be had.
Status make_tensor(AdapterRole role, FileDType dtype, std::vector<int64_t> shape,
                   AdapterTensor* tensor, char** data);

// One number, as a scalar of `dtype` where that holds it exactly, else of F32, else of F64.
Status make_number(AdapterRole role, FileDType dtype, double value, AdapterTensor* tensor);

// The same bytes under another shape of as many elements.
AdapterTensor reshaped(const AdapterTensor& tensor, std::vector<int64_t> shape);

// Rows of the first dimension, in this order: a view where they lie together, else a copy.
struct RowRun {
  int64_t row = 0;
  int64_t rows = 0;
};
Status rows_of_tensor(const AdapterTensor& tensor, const std::vector<RowRun>& runs,
                      AdapterTensor* part);

// A copy times `factor`, each element rounded once. kUnsupportedDtype for what is not F64, F32, F16 or BF16.
// *inexact counts the elements whose product is not the exact one.
Status scaled(const AdapterTensor& tensor, double factor, AdapterTensor* result, int64_t* inexact);

// A copy as another type of these.
Status converted(const AdapterTensor& tensor, FileDType dtype, AdapterTensor* result);

}  // namespace loraaccel
