// ServedPlace: a device whose memory can have the rows of served tables (served_table.h), for
// operators on that device. cc/serving_device has it for any Device.
#ifndef DYNEMB_SERVING_SERVED_PLACE_H_
#define DYNEMB_SERVING_SERVED_PLACE_H_

#include <memory>

#include "cc/lookup/lookups.h"
#include "cc/table/status.h"
#include "cc/table/table.h"

namespace dynemb {

class ServedTable;

class ServedPlace {
 public:
  virtual ~ServedPlace() = default;

  // Creates a table with the rows of `table` in this place; when the call returns, they are there.
  // `before` is null, or a table that this place has created for the same options; both share the
  // memory of sources that they have in common. Lookups in `before` go on meanwhile.
  // ResourceExhausted names the memory that is missing.
  virtual Status Place(const ServedTable& table, const Table* before,
                       std::shared_ptr<Table>* placed) = 0;

  // The calls over several tables that this place has created: as ServedLookups().
  virtual Lookups& lookups() = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_SERVING_SERVED_PLACE_H_
