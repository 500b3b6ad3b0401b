// One entry from the tensors of one layer.
#pragma once

#include <string>

#include "loraaccel/adapter.h"

namespace loraaccel {

// Sets kind and rank from the tensors, and checks that they are all there and fit together. What is missing of a pair goes
// to `missing` ("lora_up"); with nothing but an alpha or another orphan, *orphan is true.
// kMalformedFile names the key, what was found and what was expected.
Status complete_entry(const std::string& where, AdapterEntry* entry,
                      std::vector<std::string>* missing, bool* orphan);

// [out, r] of a factor pair may come as [out, r, 1, 1]: the product of all dimensions from the first on.
int64_t columns_of(const AdapterTensor& tensor);

// The entry's alpha tensor as a number.
Status alpha_of(const std::string& where, const AdapterEntry& entry, std::optional<double>* alpha);

// The factor of the entry, once its rank is known; `source` has what a configuration says.
Status scale_entry(const std::string& where, ScaleSource source, AdapterEntry* entry);

}  // namespace loraaccel
