// Adapters of some rows of a layer from one of all, and the other way round.
//
// Note [Rows of an adapter]
// A file may have one adapter for q, k and v, and another file three. With B = [B_q; B_k; B_v] below one another:
//   split   delta_q = s B_q A: A is the same for all, and rank, alpha and s stay what they are. Where B is block-diagonal,
//           as joining makes it, each part takes back its own rows of A: rank r_q, and alpha_q = s r_q.
//   join    A = [A_q; A_k; A_v], B block-diagonal, rank the sum, alpha = s times the rank. Where all A are the same bytes,
//           B_q, B_k, B_v below one another and rank as before. Different s are multiplied into the blocks.
// LoHa is the same in both pairs. LoKr's rows are (row of the first factor) b + (row of the second), with b rows in the
// second: exact where parts begin at multiples of b, joined where the second factors are the same bytes.
// A magnitude of DoRA is a number for each row.
#pragma once

#include "adapters/made_tensor.h"
#include "loraaccel/adapter.h"

namespace loraaccel {

// Is the magnitude of DoRA one for each output? (LyCORIS has another kind, for each input.)
bool dora_on_output(const AdapterEntry& entry);

// Where all of `parts` together are the rows of a block-diagonal B: the ranks of each part's block, [begin, end).
// Empty where B is not block-diagonal.
std::vector<RowRun> rank_blocks(const AdapterEntry& entry,
                                const std::vector<std::vector<RowRun>>& parts);

// The adapter of these rows. `ranks`: only these rows of A, and columns of B (a block of rank_blocks()); or rows = 0.
Status take_rows(const AdapterEntry& entry, const std::vector<RowRun>& runs, RowRun ranks,
                 AdapterEntry* part);

// Rows [row, row + rows) of the joined adapter are rows [entry_row, ...) of an entry.
struct RowShare {
  const AdapterEntry* entry = nullptr;
  int64_t entry_row = 0;
  int64_t row = 0;
  int64_t rows = 0;
};
// `rows`: of the whole; those that no share has get no update. *inexact counts elements that different factors rounded.
Status join_rows(const std::vector<RowShare>& shares, int64_t rows, AdapterEntry* joined,
                 int64_t* inexact);

// Multiplies the factor into the tensors, so that it is 1; powers of two as evenly as possible on both sides.
Status fold_scale(AdapterEntry* entry, int64_t* inexact);

}  // namespace loraaccel
