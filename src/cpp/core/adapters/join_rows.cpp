#include <algorithm>
#include <cmath>
#include <cstring>

#include "adapters/entry.h"
#include "adapters/numbers.h"
#include "adapters/rows.h"

namespace loraaccel {
namespace {

using Role = AdapterRole;

bool same_bytes(const AdapterTensor& a, const AdapterTensor& b) {
  return a.dtype == b.dtype && a.shape == b.shape &&
         (a.data == b.data || std::memcmp(a.data, b.data, a.size_bytes()) == 0);
}

class Joiner {
 public:
  Joiner(const std::vector<RowShare>& shares, int64_t rows, AdapterEntry* joined)
      : shares_(shares), rows_(rows), joined_(*joined) {
    for (const RowShare& share : shares) {
      if (std::find(entries_.begin(), entries_.end(), share.entry) == entries_.end())
        entries_.push_back(share.entry);
      covered_ += share.rows;
    }
  }

  Status run(int64_t* inexact) {
    const AdapterEntry& first = *entries_[0];
    joined_ = AdapterEntry();
    joined_.component = first.component;
    joined_.path = first.path;
    joined_.native_rows = first.native_rows;
    joined_.kind = first.kind;
    for (const AdapterEntry* e : entries_) {
      if (e->kind != first.kind)
        return cannot("its parts are of the kinds " + std::string(adapter_kind_name(first.kind)) +
                      " and " + adapter_kind_name(e->kind));
      if (!dora_on_output(*e)) return cannot("its DoRA is over inputs, a number of all rows");
      if ((e->find(Role::kDoraScale) != nullptr) != (first.find(Role::kDoraScale) != nullptr))
        return cannot("only some of its parts have DoRA");
    }
    if (first.find(Role::kDoraScale) != nullptr && covered_ != rows_)
      return cannot("some rows have no part, and DoRA changes every row");
    LORAACCEL_RETURN_IF_ERROR(equal_scales(inexact));
    switch (first.kind) {
      case AdapterKind::kLora:
        LORAACCEL_RETURN_IF_ERROR(pairs({{Role::kDown, Role::kUp}}));
        break;
      case AdapterKind::kLoha:
        LORAACCEL_RETURN_IF_ERROR(
            pairs({{Role::kHada1B, Role::kHada1A}, {Role::kHada2B, Role::kHada2A}}));
        break;
      case AdapterKind::kLokr:
        LORAACCEL_RETURN_IF_ERROR(kron());
        break;
      case AdapterKind::kFull:
      case AdapterKind::kNorm:
        break;
      default:
        return cannot("expected lora, loha, lokr, full or norm");
    }
    for (const Role role : {Role::kDiff, Role::kDiffBias, Role::kNormWeight, Role::kNormBias,
                            Role::kUpBias, Role::kDoraScale}) {
      LORAACCEL_RETURN_IF_ERROR(stack(role));
    }
    return Status();
  }

 private:
  Status cannot(const std::string& why) const {
    return Status(StatusCode::kInvalidArgument,
                  entries_[0]->path + ": its parts cannot be made one adapter: " + why);
  }

  // Parts of another strength than the first get the difference multiplied in.
  Status equal_scales(int64_t* inexact) {
    const double scale = entries_[0]->scale.value;
    joined_.scale = entries_[0]->scale;
    const bool same = std::all_of(entries_.begin(), entries_.end(),
                                  [&](const AdapterEntry* e) { return e->scale.value == scale; });
    if (same) return Status();
    joined_.scale = AdapterScale{1, ScaleRule::kNoAlpha, "1, different factors were multiplied in"};
    folded_.reserve(entries_.size());
    for (const AdapterEntry*& e : entries_) {
      folded_.push_back(*e);
      LORAACCEL_RETURN_IF_ERROR(fold_scale(&folded_.back(), inexact));
      for (RowShare& share : shares_) {
        if (share.entry == e) share.entry = &folded_.back();
      }
      e = &folded_.back();
    }
    return Status();
  }

  FileDType common_dtype(Role role) const {
    FileDType dtype = entries_[0]->find(role)->dtype;
    for (const AdapterEntry* e : entries_) {
      if (e->find(role)->dtype != dtype) dtype = FileDType::kF32;
    }
    return dtype;
  }

  Status as(const AdapterTensor& tensor, FileDType dtype, AdapterTensor* result) const {
    if (tensor.dtype == dtype) {
      *result = tensor;
      return Status();
    }
    return converted(tensor, dtype, result);
  }

  // What has a number, or a row, for each output.
  Status stack(Role role) {
    const auto has = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const AdapterEntry* e) { return e->find(role) != nullptr; });
    if (has == entries_.end()) return Status();
    const AdapterTensor& like = *(*has)->find(role);
    FileDType dtype = like.dtype;
    for (const AdapterEntry* e : entries_) {
      if (e->find(role) != nullptr && e->find(role)->dtype != dtype) dtype = FileDType::kF32;
    }
    std::vector<int64_t> shape = like.shape;
    shape[0] = rows_;
    AdapterTensor result;
    char* to = nullptr;
    LORAACCEL_RETURN_IF_ERROR(make_tensor(role, dtype, shape, &result, &to));
    const uint64_t row_bytes = result.size_bytes() / static_cast<uint64_t>(rows_);
    for (const RowShare& share : shares_) {
      const AdapterTensor* given = share.entry->find(role);
      if (given == nullptr) continue;
      if (columns_of(*given) != columns_of(like))
        return cannot("its parts have " + std::to_string(columns_of(like)) + " and " +
                      std::to_string(columns_of(*given)) + " inputs");
      AdapterTensor t;
      LORAACCEL_RETURN_IF_ERROR(as(*given, dtype, &t));
      std::memcpy(
          to + static_cast<uint64_t>(share.row) * row_bytes,
          static_cast<const char*>(t.data) + static_cast<uint64_t>(share.entry_row) * row_bytes,
          static_cast<uint64_t>(share.rows) * row_bytes);
    }
    joined_.tensors.push_back(std::move(result));
    return Status();
  }

  struct Pair {
    Role in;   // [r, ...]: parts below one another
    Role out;  // [rows, r]: parts on the diagonal
  };

  Status pairs(const std::vector<Pair>& all) {
    for (const AdapterEntry* e : entries_) {
      if (e->find(Role::kMid) != nullptr || e->find(Role::kHadaT1) != nullptr)
        return cannot("a Tucker core belongs to one of them");
    }
    bool shared = true;
    for (const Pair& pair : all) {
      const AdapterTensor& in = *entries_[0]->find(pair.in);
      for (const AdapterEntry* e : entries_) {
        const AdapterTensor& other = *e->find(pair.in);
        if (columns_of(other) != columns_of(in))
          return cannot("its parts have " + std::to_string(columns_of(in)) + " and " +
                        std::to_string(columns_of(other)) + " inputs");
        shared = shared && same_bytes(in, other);
      }
    }
    int64_t rank = 0;
    std::vector<int64_t> first_rank;
    for (const AdapterEntry* e : entries_) {
      first_rank.push_back(shared ? 0 : rank);
      rank += e->rank;
    }
    joined_.rank = shared ? entries_[0]->rank : rank;
    for (const Pair& pair : all) {
      if (shared) {
        joined_.tensors.push_back(*entries_[0]->find(pair.in));
      } else {
        LORAACCEL_RETURN_IF_ERROR(below_one_another(pair.in));
      }
      LORAACCEL_RETURN_IF_ERROR(on_the_diagonal(pair.out, first_rank));
    }
    return Status();
  }

  Status below_one_another(Role role) {
    const FileDType dtype = common_dtype(role);
    std::vector<int64_t> shape = entries_[0]->find(role)->shape;
    shape[0] = joined_.rank;
    AdapterTensor result;
    char* to = nullptr;
    LORAACCEL_RETURN_IF_ERROR(make_tensor(role, dtype, shape, &result, &to));
    for (const AdapterEntry* e : entries_) {
      AdapterTensor t;
      LORAACCEL_RETURN_IF_ERROR(as(*e->find(role), dtype, &t));
      std::memcpy(to, t.data, t.size_bytes());
      to += t.size_bytes();
    }
    joined_.tensors.push_back(std::move(result));
    return Status();
  }

  Status on_the_diagonal(Role role, const std::vector<int64_t>& first_rank) {
    const FileDType dtype = common_dtype(role);
    std::vector<int64_t> shape = entries_[0]->find(role)->shape;
    shape[0] = rows_;
    shape[1] = joined_.rank;
    AdapterTensor result;
    char* to = nullptr;
    LORAACCEL_RETURN_IF_ERROR(make_tensor(role, dtype, shape, &result, &to));
    const int64_t size = file_dtype_bits(dtype) / 8;
    for (const RowShare& share : shares_) {
      const auto which = static_cast<size_t>(
          std::find(entries_.begin(), entries_.end(), share.entry) - entries_.begin());
      AdapterTensor t;
      LORAACCEL_RETURN_IF_ERROR(as(*share.entry->find(role), dtype, &t));
      const int64_t width = share.entry->rank;
      for (int64_t i = 0; i < share.rows; ++i) {
        std::memcpy(to + ((share.row + i) * joined_.rank + first_rank[which]) * size,
                    static_cast<const char*>(t.data) + (share.entry_row + i) * width * size,
                    static_cast<size_t>(width * size));
      }
    }
    joined_.tensors.push_back(std::move(result));
    return Status();
  }

  Status kron() {
    if (covered_ != rows_) return cannot("some rows have no part");
    const AdapterEntry& first = *entries_[0];
    for (const AdapterEntry* e : entries_) {
      for (const AdapterTensor& t : e->tensors) {
        const bool stacked = t.role == Role::kKron1 || t.role == Role::kKron1A;
        if (stacked || t.role == Role::kDoraScale || t.role == Role::kAlpha ||
            t.role == Role::kDiffBias)
          continue;
        const AdapterTensor* other = first.find(t.role);
        if (other == nullptr || !same_bytes(*other, t) || e->tensors.size() != first.tensors.size())
          return cannot("LoKr parts with different second factors have no exact sum");
      }
    }
    const Role whole = first.find(Role::kKron1) != nullptr ? Role::kKron1 : Role::kKron1A;
    const AdapterTensor& like = *first.find(whole);
    const int64_t unit = first.out() / like.shape[0];
    std::vector<RowShare> units = shares_;
    for (RowShare& share : units) {
      if (share.row % unit != 0 || share.entry_row % unit != 0 || share.rows % unit != 0)
        return cannot("its parts do not begin at multiples of the second factor's rows");
      share.row /= unit;
      share.entry_row /= unit;
      share.rows /= unit;
    }
    std::swap(units, shares_);
    const int64_t rows = rows_;
    rows_ = rows / unit;
    const Status status = stack(whole);
    rows_ = rows;
    std::swap(units, shares_);
    LORAACCEL_RETURN_IF_ERROR(status);
    for (const AdapterTensor& t : first.tensors) {
      if (t.role != whole && t.role != Role::kDoraScale && t.role != Role::kAlpha &&
          t.role != Role::kDiffBias)
        joined_.tensors.push_back(t);
    }
    joined_.rank = first.rank;
    return Status();
  }

  std::vector<RowShare> shares_;
  int64_t rows_;
  int64_t covered_ = 0;
  AdapterEntry& joined_;
  std::vector<const AdapterEntry*> entries_;
  std::vector<AdapterEntry> folded_;
};

Status scale_role(AdapterEntry* entry, Role role, double factor, int64_t* inexact) {
  for (AdapterTensor& t : entry->tensors) {
    if (t.role != role || factor == 1) continue;
    AdapterTensor result;
    LORAACCEL_RETURN_IF_ERROR(scaled(t, factor, &result, inexact));
    t = std::move(result);
  }
  return Status();
}

}  // namespace

Status join_rows(const std::vector<RowShare>& shares, int64_t rows, AdapterEntry* joined,
                 int64_t* inexact) {
  return Joiner(shares, rows, joined).run(inexact);
}

Status fold_scale(AdapterEntry* entry, int64_t* inexact) {
  const double scale = entry->scale.value;
  std::erase_if(entry->tensors, [](const AdapterTensor& t) { return t.role == Role::kAlpha; });
  if (scale == 1) return Status();
  // Half of the binary exponent to each side: keeps small numbers out of float16's subnormals.
  int exponent = 0;
  const double mantissa = std::frexp(scale, &exponent);
  const int half = exponent / 2;
  const double up = std::ldexp(1.0, half);
  const double down = std::ldexp(mantissa, exponent - half);
  const auto pair = [&](Role in, Role out) {
    LORAACCEL_RETURN_IF_ERROR(scale_role(entry, in, down, inexact));
    return scale_role(entry, out, up, inexact);
  };
  switch (entry->kind) {
    case AdapterKind::kLora:
      LORAACCEL_RETURN_IF_ERROR(pair(Role::kDown, Role::kUp));
      LORAACCEL_RETURN_IF_ERROR(scale_role(entry, Role::kUpBias, scale, inexact));
      break;
    case AdapterKind::kEmbedding:
      LORAACCEL_RETURN_IF_ERROR(pair(Role::kEmbeddingDown, Role::kEmbeddingUp));
      break;
    case AdapterKind::kLoha:
      LORAACCEL_RETURN_IF_ERROR(pair(Role::kHada1B, Role::kHada1A));
      break;
    case AdapterKind::kLokr:
      LORAACCEL_RETURN_IF_ERROR(
          scale_role(entry, entry->find(Role::kKron1) != nullptr ? Role::kKron1 : Role::kKron1A,
                     scale, inexact));
      break;
    default:
      return Status();
  }
  entry->scale =
      AdapterScale{1, ScaleRule::kNoAlpha, "1, " + number_text(scale) + " is multiplied in"};
  return Status();
}

}  // namespace loraaccel
