#include "cc/table/hash_table.h"

namespace dynemb {

template class HashTable<uint64_t, OneLane>;
template class HashTable<uint32_t, OneLane>;

}  // namespace dynemb
