// For tests of the index without rows: the key of row r is r.
#ifndef DYNEMB_TESTS_CC_ROWS_ARE_KEYS_H_
#define DYNEMB_TESTS_CC_ROWS_ARE_KEYS_H_

#include "cc/table/index.h"
#include "cc/table/key.h"
#include "cc/table/owned_items.h"

namespace dynemb {

class RowsAreKeys final : public Index::RowHashes {
 public:
  void Read(const RowId* rows, size_t n, uint64_t* hashes) const override {
    for (size_t i = 0; i < n; ++i) hashes[i] = MixKey(rows[i]);
  }
};

// The owners of n items in these segments, as Index::Grow needs them.
inline OwnedItems OwnersOf(Exec& exec, const Index& index, const uint32_t* segment_of, size_t n) {
  OwnedItems owned;
  owned.Build(exec, n, [&](size_t i) { return segment_of[i] >> index.OwnerShift(); });
  return owned;
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_ROWS_ARE_KEYS_H_
