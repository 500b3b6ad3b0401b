// The names of base models' layers, for programs and tests that look at the tables themselves.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace loraaccel {

// Rows [row, row + rows) of the layer `spelled` in column `column` ("native", "diffusers" ...) are rows
// [native_row, native_row + rows) of the layer `native`.
struct AdapterName {
  std::string component;
  std::string native;
  std::string kind;  // "linear", "conv1", "conv2", "conv3", "norm", "scale", "embedding"
  int64_t out = 0;
  int64_t in = 0;
  std::string column;
  std::string spelled;
  int64_t row = 0;
  int64_t native_row = 0;
  int64_t rows = 0;
};

// Every spelling of every layer; empty for a base without a table.
std::vector<AdapterName> adapter_names(const std::string& base);

}  // namespace loraaccel
