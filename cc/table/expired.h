// Expired: the rows of a table that have expired (expiry.h).
#ifndef DYNEMB_TABLE_EXPIRED_H_
#define DYNEMB_TABLE_EXPIRED_H_

#include "cc/table/portability.h"
#include "cc/table/stamps.h"
#include "cc/table/types.h"

namespace dynemb {

// The rows whose last update, or last access, has a rank below a limit.
struct Expired {
  StampOrder order;
  Stamp least_rank = 0;  // rows with lower ranks have expired; 0: none has
  bool by_access = false;

  Expired() = default;
  // The rows that were last used at `horizon` or before; 0: none.
  Expired(const Stamps& stamps, Tick horizon, bool since_access)
      : order(stamps.order()), by_access(since_access) {
    if (horizon != 0 && horizon >= stamps.base()) {
      least_rank = static_cast<Stamp>(horizon - stamps.base() + 1);
    }
  }

  DYNEMB_HD bool any() const { return least_rank != 0; }
  // Whether a row has expired. `used` is its score if by_access, otherwise its last update.
  DYNEMB_HD bool operator()(Stamp used) const { return order.Rank(used) < least_rank; }
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_EXPIRED_H_
