// DispatchKeys: from a Table to its implementation for a key width, for code that fuses its own
// work with the table's passes.
#ifndef DYNEMB_LOOKUP_DISPATCH_H_
#define DYNEMB_LOOKUP_DISPATCH_H_

#include "cc/table/hash_table.h"

namespace dynemb {

// Calls fn(HashTable<K>&, const K* keys). `table` was created by Table::Create.
template <class Fn>
auto DispatchKeys(Table* table, const void* keys, const Fn& fn) {
  if (table->options().key_type == KeyType::kInt32) {
    return fn(*static_cast<HashTable<uint32_t>*>(table), static_cast<const uint32_t*>(keys));
  }
  return fn(*static_cast<HashTable<uint64_t>*>(table), static_cast<const uint64_t*>(keys));
}

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_DISPATCH_H_
