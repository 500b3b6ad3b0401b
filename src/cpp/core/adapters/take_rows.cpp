#include <algorithm>
#include <cmath>

#include "adapters/entry.h"
#include "adapters/numbers.h"
#include "adapters/rows.h"

namespace loraaccel {
namespace {

using Role = AdapterRole;

Status cannot(const AdapterEntry& entry, const std::string& why) {
  return Status(StatusCode::kInvalidArgument, entry.path + ": its " +
                                                  adapter_kind_name(entry.kind) +
                                                  " adapter cannot be divided by rows: " + why);
}

// Columns [begin, begin + count) of a matrix [rows, cols, 1 ...].
Status columns_of_tensor(const AdapterTensor& tensor, RowRun columns, AdapterTensor* part) {
  std::vector<int64_t> shape = tensor.shape;
  shape[1] = columns.rows;
  char* to = nullptr;
  LORAACCEL_RETURN_IF_ERROR(make_tensor(tensor.role, tensor.dtype, shape, part, &to));
  part->key = tensor.key;
  const int64_t size = file_dtype_bits(tensor.dtype) / 8;
  const char* from = static_cast<const char*>(tensor.data);
  for (int64_t i = 0; i < tensor.shape[0]; ++i) {
    const char* row = from + (i * tensor.shape[1] + columns.row) * size;
    to = std::copy(row, row + columns.rows * size, to);
  }
  return Status();
}

// Columns in the order of the runs, of LoHa with cores, whose factor is [r, out].
Status gather_columns(const AdapterTensor& tensor, const std::vector<RowRun>& runs,
                      AdapterTensor* part) {
  int64_t count = 0;
  for (const RowRun& run : runs) count += run.rows;
  char* to = nullptr;
  LORAACCEL_RETURN_IF_ERROR(
      make_tensor(tensor.role, tensor.dtype, {tensor.shape[0], count}, part, &to));
  part->key = tensor.key;
  const int64_t size = file_dtype_bits(tensor.dtype) / 8;
  const char* from = static_cast<const char*>(tensor.data);
  for (int64_t i = 0; i < tensor.shape[0]; ++i) {
    for (const RowRun& run : runs) {
      const char* row = from + (i * tensor.shape[1] + run.row) * size;
      to = std::copy(row, row + run.rows * size, to);
    }
  }
  return Status();
}

// Runs in units of `unit` rows; false where one begins or ends in between.
bool in_units(const std::vector<RowRun>& runs, int64_t unit, std::vector<RowRun>* result) {
  for (const RowRun& run : runs) {
    if (unit == 0 || run.row % unit != 0 || run.rows % unit != 0) return false;
    result->push_back({run.row / unit, run.rows / unit});
  }
  return true;
}

bool by_rows(const AdapterEntry& entry, Role role) {
  switch (role) {
    case Role::kUp:
    case Role::kUpBias:
    case Role::kDiff:
    case Role::kDiffBias:
    case Role::kNormWeight:
    case Role::kNormBias:
    case Role::kWeight:
    case Role::kBias:
    case Role::kDoraScale:
      return true;
    case Role::kHada1A:
    case Role::kHada2A:
      return entry.find(Role::kHadaT1) == nullptr;
    default:
      return false;
  }
}

bool is_zero(const AdapterTensor& t, int64_t row, int64_t column) {
  const int64_t size = file_dtype_bits(t.dtype) / 8;
  const char* bytes = static_cast<const char*>(t.data) + (row * t.shape[1] + column) * size;
  return std::all_of(bytes, bytes + size, [](char c) { return c == 0; });
}

}  // namespace

bool dora_on_output(const AdapterEntry& entry) {
  const AdapterTensor* dora = entry.find(Role::kDoraScale);
  if (dora == nullptr) return true;
  const int64_t out = entry.out();
  return dora->numel() == out && (dora->shape.size() < 2 || dora->shape[0] == out);
}

std::vector<RowRun> rank_blocks(const AdapterEntry& entry,
                                const std::vector<std::vector<RowRun>>& parts) {
  const AdapterTensor* up = entry.find(Role::kUp);
  if (entry.kind != AdapterKind::kLora || parts.size() < 2 || entry.find(Role::kMid) != nullptr)
    return {};
  const int64_t rank = entry.rank;
  // The columns that a part uses, as a range; a zero B uses none, and is then no proof of anything.
  std::vector<RowRun> used;
  for (const std::vector<RowRun>& runs : parts) {
    int64_t first = rank;
    int64_t last = -1;
    for (const RowRun& run : runs) {
      for (int64_t row = run.row; row < run.row + run.rows; ++row) {
        for (int64_t c = 0; c < first; ++c) {
          if (!is_zero(*up, row, c)) first = c;
        }
        for (int64_t c = rank - 1; c > last; --c) {
          if (!is_zero(*up, row, c)) last = c;
        }
        if (first == 0 && last == rank - 1) return {};
      }
    }
    if (last < 0) return {};
    used.push_back({first, last - first + 1});
  }
  // Equal blocks where they are possible, else each part's from its first column to the next part's.
  std::vector<RowRun> blocks;
  const auto count = static_cast<int64_t>(parts.size());
  bool equal = rank % count == 0;
  for (int64_t i = 0; i < count && equal; ++i) {
    const RowRun& u = used[static_cast<size_t>(i)];
    equal = u.row >= i * (rank / count) && u.row + u.rows <= (i + 1) * (rank / count);
    blocks.push_back({i * (rank / count), rank / count});
  }
  if (equal) return blocks;
  blocks.clear();
  for (size_t i = 0; i < used.size(); ++i) {
    const int64_t begin = i == 0 ? 0 : used[i].row;
    const int64_t end = i + 1 < used.size() ? used[i + 1].row : rank;
    if (used[i].row + used[i].rows > end || begin >= end) return {};
    blocks.push_back({begin, end - begin});
  }
  return blocks;
}

Status take_rows(const AdapterEntry& entry, const std::vector<RowRun>& runs, RowRun ranks,
                 AdapterEntry* part) {
  *part = entry;
  part->rows.clear();
  part->tensors.clear();
  if (entry.out() == 0 || entry.kind == AdapterKind::kEmbedding)
    return cannot(entry, "expected lora, loha, lokr, full or norm");
  if (!dora_on_output(entry)) return cannot(entry, "its DoRA is over inputs, a number of all rows");
  std::vector<RowRun> kron_runs;
  if (entry.kind == AdapterKind::kLokr) {
    const AdapterTensor* first =
        entry.find(Role::kKron1) != nullptr ? entry.find(Role::kKron1) : entry.find(Role::kKron1A);
    if (!in_units(runs, entry.out() / first->shape[0], &kron_runs))
      return cannot(entry, "the parts do not begin at multiples of the second factor's " +
                               std::to_string(entry.out() / first->shape[0]) + " rows");
  }
  for (const AdapterTensor& t : entry.tensors) {
    AdapterTensor piece = t;
    if (by_rows(entry, t.role)) {
      LORAACCEL_RETURN_IF_ERROR(rows_of_tensor(t, runs, &piece));
      if (t.role == Role::kUp && ranks.rows > 0) {
        const AdapterTensor rows = piece;
        LORAACCEL_RETURN_IF_ERROR(columns_of_tensor(rows, ranks, &piece));
      }
    } else if (t.role == Role::kHada1A || t.role == Role::kHada2A) {
      LORAACCEL_RETURN_IF_ERROR(gather_columns(t, runs, &piece));
    } else if (t.role == Role::kKron1 || t.role == Role::kKron1A) {
      LORAACCEL_RETURN_IF_ERROR(rows_of_tensor(t, kron_runs, &piece));
    } else if (t.role == Role::kDown && ranks.rows > 0) {
      LORAACCEL_RETURN_IF_ERROR(rows_of_tensor(t, {ranks}, &piece));
    } else if (t.role == Role::kAlpha && ranks.rows > 0) {
      continue;  // made anew from scale and rank
    }
    part->tensors.push_back(std::move(piece));
  }
  if (ranks.rows > 0) part->rank = ranks.rows;
  return Status();
}

}  // namespace loraaccel
