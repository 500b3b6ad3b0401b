#include "adapters/pattern.h"

#include <bitset>
#include <string>
#include <utility>
#include <vector>

namespace loraaccel {
namespace {

constexpr size_t kMaxInstructions = 20000;
constexpr int kMaxDepth = 50;
constexpr int kMaxRepeats = 1000;

using Set = std::bitset<256>;

// A machine that is in many places at once: one step for each character, no going back.
struct Instruction {
  enum class What : uint8_t { kSet, kSplit, kMatch } what = What::kMatch;
  Set set;          // of characters
  size_t next = 0;  // of kSplit: two places to be in
  size_t other = 0;
};
using Program = std::vector<Instruction>;

class Compiler {
 public:
  explicit Compiler(std::string_view text) : text_(text) {}

  Status compile(Program* program) {
    if (!either(program, 0)) return fail();
    if (at_ < text_.size()) return fail();
    program->push_back({Instruction::What::kMatch, {}, 0, 0});
    return Status();
  }

 private:
  Status fail() const {
    return Status(StatusCode::kInvalidArgument,
                  "the pattern " + std::string(text_.substr(0, 200)) +
                      " is not understood, expected a layer's name or a simple regular expression");
  }
  bool more() const { return at_ < text_.size(); }

  // Every part is compiled to instructions whose places count from the part's own beginning.
  static void append(Program* to, const Program& part) {
    const size_t shift = to->size();
    for (Instruction i : part) {
      i.next += shift;
      i.other += shift;
      to->push_back(i);
    }
  }

  bool either(Program* out, int depth) {
    if (depth > kMaxDepth) return false;
    Program left;
    if (!sequence(&left, depth)) return false;
    while (more() && text_[at_] == '|') {
      ++at_;
      Program right;
      if (!sequence(&right, depth)) return false;
      Program both;
      both.push_back({Instruction::What::kSplit, {}, 1, left.size() + 2});
      append(&both, left);
      both.push_back({Instruction::What::kSplit, {}, 0, 0});
      const size_t end = both.size() + right.size();
      both.back().next = both.back().other = end;
      append(&both, right);
      left = std::move(both);
    }
    append(out, left);
    return out->size() < kMaxInstructions;
  }

  bool sequence(Program* out, int depth) {
    while (more() && text_[at_] != '|' && text_[at_] != ')') {
      Program item;
      if (!atom(&item, depth) || !repeat(&item)) return false;
      append(out, item);
      if (out->size() > kMaxInstructions) return false;
    }
    return true;
  }

  bool atom(Program* out, int depth) {
    const char c = text_[at_++];
    Set set;
    switch (c) {
      case '(': {
        if (text_.substr(at_, 2) == "?:") at_ += 2;
        if (more() && text_[at_] == '?') return false;
        if (!either(out, depth + 1) || !more() || text_[at_] != ')') return false;
        ++at_;
        return true;
      }
      case '[':
        if (!bracket(&set)) return false;
        break;
      case '\\':
        if (!escape(&set)) return false;
        break;
      case '.':
        set.set();
        set.reset('\n');
        break;
      case '^':
      case '$':
        // At an end of the whole they say what holds anyway; elsewhere they are not worth it.
        return (c == '^' && at_ == 1) || (c == '$' && !more());
      case '*':
      case '+':
      case '?':
      case '{':
      case '}':
      case ']':
        return false;
      default:
        set.set(static_cast<unsigned char>(c));
    }
    out->push_back({Instruction::What::kSet, set, 0, 0});
    return true;
  }

  bool escape(Set* set) {
    if (!more()) return false;
    const char c = text_[at_++];
    const char lower = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    if (lower == 'd' || lower == 'w') {
      for (int i = '0'; i <= '9'; ++i) set->set(static_cast<size_t>(i));
      if (lower == 'w') {
        for (int i = 'a'; i <= 'z'; ++i) set->set(static_cast<size_t>(i));
        for (int i = 'A'; i <= 'Z'; ++i) set->set(static_cast<size_t>(i));
        set->set('_');
      }
    } else if (lower == 's') {
      for (const char space : {' ', '\t', '\n', '\r', '\f', '\v'})
        set->set(static_cast<size_t>(space));
    } else if ((lower >= 'a' && lower <= 'z') || (c >= '0' && c <= '9')) {
      return false;
    } else {
      set->set(static_cast<unsigned char>(c));
      return true;
    }
    if (c != lower) set->flip();
    return true;
  }

  bool bracket(Set* set) {
    const bool negated = more() && text_[at_] == '^';
    if (negated) ++at_;
    for (bool first = true; more() && (first || text_[at_] != ']'); first = false) {
      char c = text_[at_++];
      if (c == '\\') {
        if (!escape(set)) return false;
        continue;
      }
      if (at_ + 1 < text_.size() && text_[at_] == '-' && text_[at_ + 1] != ']') {
        const char last = text_[at_ + 1];
        at_ += 2;
        if (last == '\\' || last < c) return false;
        for (int i = static_cast<unsigned char>(c); i <= static_cast<unsigned char>(last); ++i)
          set->set(static_cast<size_t>(i));
        continue;
      }
      set->set(static_cast<unsigned char>(c));
    }
    if (!more()) return false;
    ++at_;
    if (negated) set->flip();
    return true;
  }

  bool repeat(Program* item) {
    if (!more()) return true;
    int least = 1;
    int most = 1;
    bool endless = false;
    switch (text_[at_]) {
      case '*':
        least = most = 0;
        endless = true;
        break;
      case '+':
        endless = true;
        break;
      case '?':
        least = 0;
        break;
      case '{':
        if (!bounds(&least, &most, &endless)) return false;
        break;
      default:
        return true;
    }
    ++at_;
    if (more() && text_[at_] == '?') ++at_;  // how greedy it is does not change what matches
    Program out;
    for (int i = 0; i < (endless ? least : most); ++i) {
      if (i >= least)
        out.push_back(
            {Instruction::What::kSplit, {}, out.size() + 1, out.size() + 1 + item->size()});
      append(&out, *item);
      if (out.size() > kMaxInstructions) return false;
    }
    if (endless) {
      const size_t loop = out.size();
      out.push_back({Instruction::What::kSplit, {}, loop + 1, loop + 2 + item->size()});
      append(&out, *item);
      out.push_back({Instruction::What::kSplit, {}, loop, loop});
    }
    *item = std::move(out);
    return true;
  }

  bool number(int* value) {
    const size_t begin = at_;
    *value = 0;
    while (more() && text_[at_] >= '0' && text_[at_] <= '9' && *value <= kMaxRepeats)
      *value = *value * 10 + (text_[at_++] - '0');
    return at_ > begin && *value <= kMaxRepeats;
  }

  bool bounds(int* least, int* most, bool* endless) {
    ++at_;
    if (!number(least)) return false;
    *most = *least;
    if (more() && text_[at_] == ',') {
      ++at_;
      *endless = more() && text_[at_] == '}';
      if (!*endless && !number(most)) return false;
    }
    return more() && text_[at_] == '}' && *least <= *most;
  }

  std::string_view text_;
  size_t at_ = 0;
};

class Run {
 public:
  explicit Run(const Program& program) : program_(program), seen_(program.size(), 0) {}

  bool matches(std::string_view text) {
    std::vector<size_t> places;
    start(0, &places);
    for (const char c : text) {
      std::vector<size_t> next;
      ++step_;
      for (const size_t place : places) {
        const Instruction& i = program_[place];
        if (i.what == Instruction::What::kSet && i.set[static_cast<unsigned char>(c)])
          start(place + 1, &next);
      }
      places.swap(next);
      if (places.empty()) return false;
    }
    for (const size_t place : places) {
      if (program_[place].what == Instruction::What::kMatch) return true;
    }
    return false;
  }

 private:
  void start(size_t place, std::vector<size_t>* places) {
    std::vector<size_t> open = {place};
    while (!open.empty()) {
      const size_t p = open.back();
      open.pop_back();
      if (seen_[p] == step_) continue;
      seen_[p] = step_;
      if (program_[p].what == Instruction::What::kSplit) {
        open.push_back(program_[p].other);
        open.push_back(program_[p].next);
      } else {
        places->push_back(p);
      }
    }
  }

  const Program& program_;
  std::vector<size_t> seen_;
  size_t step_ = 1;
};

}  // namespace

Status pattern_matches(std::string_view pattern, std::string_view path, bool* matches) {
  *matches = false;
  Program program;
  LORAACCEL_RETURN_IF_ERROR(Compiler(pattern).compile(&program));
  for (size_t begin = 0;; ++begin) {
    Run run(program);
    if (run.matches(path.substr(begin))) {
      *matches = true;
      return Status();
    }
    begin = path.find('.', begin);
    if (begin == std::string_view::npos) return Status();
  }
}

}  // namespace loraaccel
