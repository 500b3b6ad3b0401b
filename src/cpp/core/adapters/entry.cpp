#include "adapters/entry.h"

#include <algorithm>
#include <initializer_list>

#include "adapters/numbers.h"

namespace loraaccel {
namespace {

using Role = AdapterRole;

Status bad_shape(const std::string& where, const AdapterTensor& t, const std::string& expected) {
  return Status(StatusCode::kMalformedFile, where + ": " + t.key + " has shape " +
                                                shape_words(t.shape) + ", expected " + expected);
}

bool any(const AdapterEntry& e, std::initializer_list<Role> roles) {
  return std::any_of(roles.begin(), roles.end(), [&](Role r) { return e.find(r) != nullptr; });
}

int64_t dim(const AdapterTensor& t, size_t i) { return i < t.shape.size() ? t.shape[i] : 1; }

class Completer {
 public:
  Completer(const std::string& where, AdapterEntry* entry, std::vector<std::string>* missing)
      : where_(where), e_(*entry), missing_(missing) {}

  Status run(bool* orphan) {
    *orphan = false;
    int kinds = 0;
    for (const Candidate& c : kCandidates) {
      if (!any(e_, c.roles)) continue;
      // a bias's difference goes with any kind
      if (c.kind == AdapterKind::kFull && kinds > 0 && e_.find(Role::kDiff) == nullptr) continue;
      e_.kind = c.kind;
      ++kinds;
    }
    if (kinds == 0) {
      *orphan = true;
      return Status();
    }
    if (kinds > 1)
      return Status(StatusCode::kMalformedFile,
                    where_ + ": " + e_.tensors[0].key + " and " + e_.tensors.back().key +
                        " are of two kinds of adapter, expected one for a layer");
    for (const AdapterTensor& t : e_.tensors) {
      if (t.role != Role::kAlpha && t.numel() == 0)
        return bad_shape(where_, t, "no dimension of 0");
    }
    switch (e_.kind) {
      case AdapterKind::kLora:
        return lora(Role::kDown, Role::kUp, 1);
      case AdapterKind::kEmbedding:
        return lora(Role::kEmbeddingDown, Role::kEmbeddingUp, 1);
      case AdapterKind::kLoha:
        return loha();
      case AdapterKind::kLokr:
        return lokr();
      default:
        return Status();
    }
  }

 private:
  struct Candidate {
    AdapterKind kind;
    std::initializer_list<Role> roles;
  };
  static const Candidate kCandidates[9];

  bool both(Role a, Role b) {
    if (e_.find(a) == nullptr) missing_->push_back(adapter_role_name(a));
    if (e_.find(b) == nullptr) missing_->push_back(adapter_role_name(b));
    return e_.find(a) != nullptr && e_.find(b) != nullptr;
  }

  Status lora(Role down_role, Role up_role, size_t rank_dim) {
    if (!both(down_role, up_role)) return Status();
    const AdapterTensor& down = *e_.find(down_role);
    const AdapterTensor& up = *e_.find(up_role);
    if (down.shape.size() != 2 && down.shape.size() != 4)
      return bad_shape(where_, down, "[r, in] or [r, in, k, k]");
    if (up.shape.size() != 2 && up.shape.size() != 4)
      return bad_shape(where_, up, "[out, r] or [out, r, 1, 1]");
    const int64_t rank = down.shape[0];
    if (up.shape[rank_dim] != rank || dim(up, 2) != 1 || dim(up, 3) != 1)
      return bad_shape(where_, up, "[out, " + std::to_string(rank) + "], the rank of " + down.key);
    const AdapterTensor* mid = e_.find(Role::kMid);
    if (mid != nullptr &&
        (mid->shape.size() != 4 || mid->shape[0] != rank || mid->shape[1] != rank))
      return bad_shape(where_, *mid, "[r, r, k, k] with rank " + std::to_string(rank));
    e_.rank = rank;
    return bias_and_dora(up.shape[0], columns_of(down));
  }

  Status bias_and_dora(int64_t out, int64_t in) {
    const AdapterTensor* bias = e_.find(Role::kUpBias);
    if (bias != nullptr && bias->numel() != out)
      return bad_shape(where_, *bias, "[" + std::to_string(out) + "]");
    const AdapterTensor* dora = e_.find(Role::kDoraScale);
    if (dora != nullptr && dora->numel() != out && dora->numel() != in)
      return bad_shape(where_, *dora, std::to_string(out) + " numbers, one for each output");
    return Status();
  }

  Status loha() {
    if (!both(Role::kHada1A, Role::kHada1B) || !both(Role::kHada2A, Role::kHada2B)) return Status();
    const bool core = any(e_, {Role::kHadaT1, Role::kHadaT2});
    if (core && !both(Role::kHadaT1, Role::kHadaT2)) return Status();
    for (const Role role : {Role::kHada1A, Role::kHada1B, Role::kHada2A, Role::kHada2B}) {
      if (e_.find(role)->shape.size() != 2)
        return bad_shape(where_, *e_.find(role), "two dimensions");
    }
    const AdapterTensor& a = *e_.find(Role::kHada1A);
    e_.rank = core ? a.shape[0] : a.shape[1];
    const int64_t out = core ? a.shape[1] : a.shape[0];
    for (const Role role : {Role::kHada1B, Role::kHada2B}) {
      const AdapterTensor& b = *e_.find(role);
      const AdapterTensor& own = *e_.find(role == Role::kHada1B ? Role::kHada1A : Role::kHada2A);
      if (b.shape[0] != own.shape[core ? 0 : 1] || b.shape[1] != e_.find(Role::kHada1B)->shape[1])
        return bad_shape(
            where_, b,
            "the rank of " + own.key + " and the width of " + e_.find(Role::kHada1B)->key);
      if (own.shape[core ? 1 : 0] != out) return bad_shape(where_, own, "as many rows as " + a.key);
    }
    for (const Role role : {Role::kHadaT1, Role::kHadaT2}) {
      const AdapterTensor* t = e_.find(role);
      if (t != nullptr &&
          (t->shape.size() != 4 || t->shape[0] != t->shape[1] || t->shape[0] != e_.rank))
        return bad_shape(where_, *t, "[r, r, k, k] with rank " + std::to_string(e_.rank));
    }
    return bias_and_dora(out, e_.find(Role::kHada1B)->shape[1]);
  }

  // A factor is whole or a pair; its rank is 0 where it is whole.
  Status kron_factor(Role whole, Role a, Role b, int64_t* rank) {
    *rank = 0;
    if (e_.find(whole) != nullptr) {
      if (any(e_, {a, b}))
        return Status(StatusCode::kMalformedFile,
                      where_ + ": " + e_.find(whole)->key + " is there both whole and as a pair");
      return Status();
    }
    if (!any(e_, {a, b})) {
      missing_->push_back(adapter_role_name(whole));
      return Status();
    }
    if (!both(a, b)) return Status();
    const AdapterTensor& left = *e_.find(a);
    const AdapterTensor& right = *e_.find(b);
    const bool core = whole == Role::kKron2 && e_.find(Role::kKronT2) != nullptr;
    if (left.shape.size() != 2) return bad_shape(where_, left, "two dimensions");
    *rank = core ? left.shape[0] : left.shape[1];
    if (right.shape.size() < 2 || right.shape[0] != *rank)
      return bad_shape(where_, right,
                       "[" + std::to_string(*rank) + ", ...], the rank of " + left.key);
    return Status();
  }

  Status lokr() {
    int64_t rank1 = 0;
    int64_t rank2 = 0;
    LORAACCEL_RETURN_IF_ERROR(kron_factor(Role::kKron1, Role::kKron1A, Role::kKron1B, &rank1));
    LORAACCEL_RETURN_IF_ERROR(kron_factor(Role::kKron2, Role::kKron2A, Role::kKron2B, &rank2));
    if (!missing_->empty()) return Status();
    for (const AdapterTensor& t : e_.tensors) {
      if ((t.role == Role::kKron1 || t.role == Role::kKron2) && t.shape.size() < 2)
        return bad_shape(where_, t, "a matrix");
    }
    const AdapterTensor* core = e_.find(Role::kKronT2);
    if (core != nullptr && (core->shape.size() != 4 || rank2 == 0 || core->shape[0] != rank2 ||
                            core->shape[1] != e_.find(Role::kKron2B)->shape[0]))
      return bad_shape(where_, *core, "[r, r, k, k] beside lokr_w2_a and lokr_w2_b");
    // the size of an inner dimension: the second factor's where both are pairs, which are equal in LyCORIS
    e_.rank = rank2 != 0 ? rank2 : rank1;
    return Status();
  }

  const std::string& where_;
  AdapterEntry& e_;
  std::vector<std::string>* missing_;
};

const Completer::Candidate Completer::kCandidates[9] = {
    {AdapterKind::kLora, {Role::kDown, Role::kUp, Role::kMid}},
    {AdapterKind::kLoha,
     {Role::kHada1A, Role::kHada1B, Role::kHada2A, Role::kHada2B, Role::kHadaT1, Role::kHadaT2}},
    {AdapterKind::kLokr,
     {Role::kKron1, Role::kKron1A, Role::kKron1B, Role::kKron2, Role::kKron2A, Role::kKron2B,
      Role::kKronT2}},
    {AdapterKind::kNorm, {Role::kNormWeight, Role::kNormBias}},
    {AdapterKind::kIa3, {Role::kIa3, Role::kIa3OnInput}},
    {AdapterKind::kOft, {Role::kOftBlocks}},
    {AdapterKind::kGlora, {Role::kGloraA1, Role::kGloraA2, Role::kGloraB1, Role::kGloraB2}},
    {AdapterKind::kEmbedding, {Role::kEmbeddingDown, Role::kEmbeddingUp}},
    {AdapterKind::kFull, {Role::kDiff, Role::kDiffBias}},
};

}  // namespace

int64_t AdapterTensor::numel() const noexcept {
  int64_t count = 1;
  for (const int64_t d : shape) count *= d;
  return count;
}

uint64_t AdapterTensor::size_bytes() const noexcept {
  return static_cast<uint64_t>(numel()) * static_cast<uint64_t>(file_dtype_bits(dtype)) / 8;
}

const AdapterTensor* AdapterEntry::find(AdapterRole role) const noexcept {
  for (const AdapterTensor& tensor : tensors) {
    if (tensor.role == role) return &tensor;
  }
  return nullptr;
}

int64_t AdapterEntry::out() const noexcept {
  const auto size = [&](Role role, size_t i) -> int64_t {
    const AdapterTensor* t = find(role);
    return t != nullptr && i < t->shape.size() ? t->shape[i] : 0;
  };
  switch (kind) {
    case AdapterKind::kLora:
      return size(Role::kUp, 0);
    case AdapterKind::kLoha:
      return size(Role::kHada1A, find(Role::kHadaT1) != nullptr ? 1 : 0);
    case AdapterKind::kLokr: {
      const int64_t a =
          find(Role::kKron1) != nullptr ? size(Role::kKron1, 0) : size(Role::kKron1A, 0);
      if (find(Role::kKron2) != nullptr) return a * size(Role::kKron2, 0);
      return a * size(Role::kKron2A, find(Role::kKronT2) != nullptr ? 1 : 0);
    }
    case AdapterKind::kFull:
      return find(Role::kDiff) != nullptr ? size(Role::kDiff, 0) : size(Role::kDiffBias, 0);
    case AdapterKind::kNorm:
      return find(Role::kNormWeight) != nullptr ? size(Role::kNormWeight, 0)
                                                : size(Role::kNormBias, 0);
    case AdapterKind::kEmbedding:
      return size(Role::kEmbeddingDown, 1);
    case AdapterKind::kReplace:
      return find(Role::kWeight) != nullptr ? size(Role::kWeight, 0) : size(Role::kBias, 0);
    default:
      return 0;
  }
}

int64_t columns_of(const AdapterTensor& tensor) {
  return tensor.shape.empty() || tensor.shape[0] == 0 ? 0 : tensor.numel() / tensor.shape[0];
}

Status complete_entry(const std::string& where, AdapterEntry* entry,
                      std::vector<std::string>* missing, bool* orphan) {
  if (any(*entry, {Role::kWeight, Role::kBias})) {
    entry->kind = AdapterKind::kReplace;
    *orphan = false;
    return Status();
  }
  return Completer(where, entry, missing).run(orphan);
}

Status alpha_of(const std::string& where, const AdapterEntry& entry, std::optional<double>* alpha) {
  alpha->reset();
  const AdapterTensor* t = entry.find(Role::kAlpha);
  if (t == nullptr) return Status();
  double value = 0;
  if (t->numel() != 1 || !element_value(t->dtype, t->data, 0, &value))
    return Status(StatusCode::kMalformedFile, where + ": " + t->key + " is " +
                                                  file_dtype_name(t->dtype) + " of shape " +
                                                  shape_words(t->shape) + ", expected one number");
  *alpha = value;
  return Status();
}

Status scale_entry(const std::string& where, ScaleSource source, AdapterEntry* entry) {
  entry->scale = AdapterScale();
  switch (entry->kind) {
    case AdapterKind::kLora:
    case AdapterKind::kLoha:
    case AdapterKind::kLokr:
    case AdapterKind::kEmbedding:
      break;
    default:
      return Status();
  }
  LORAACCEL_RETURN_IF_ERROR(alpha_of(where, *entry, &source.alpha_tensor));
  source.rank = entry->rank;
  Status status = resolve_scale(source, &entry->scale);
  if (status.ok()) return status;
  return Status(StatusCode::kMalformedFile, where + ": " + entry->path + ": " + status.message());
}

Status complete_adapter_entry(std::optional<double> alpha, AdapterEntry* entry) {
  std::vector<std::string> missing;
  bool orphan = false;
  const AdapterScale given = entry->scale;
  LORAACCEL_RETURN_IF_ERROR(complete_entry(entry->path, entry, &missing, &orphan));
  if (orphan || !missing.empty())
    return Status(StatusCode::kMalformedFile,
                  entry->path + ": " +
                      (orphan ? "no adapter among its tensors" : missing[0] + " is missing"));
  if (entry->native_rows == 0 && entry->rows.empty()) entry->native_rows = entry->out();
  ScaleSource source;
  source.config_alpha = alpha;
  source.config_rank = 1;
  LORAACCEL_RETURN_IF_ERROR(scale_entry(entry->path, source, entry));
  const bool open =
      entry->scale.rule == ScaleRule::kNoAlpha || entry->scale.rule == ScaleRule::kWholeFactors;
  if (open && given.value != 1) {
    entry->scale = given;
    if (entry->scale.rule == ScaleRule::kNone) entry->scale.rule = ScaleRule::kConfigAlpha;
  }
  return Status();
}

}  // namespace loraaccel
