// Descriptor: what an exported model says about its tables.
//
// It is an asset of the exported model, a JSON object:
//
//   {"format": "tf_dynemb.served_tables", "version": 1,
//    "tables": "../assets.extra/tf_dynemb",   the path of the snapshots; if it is not absolute,
//                                             from the folder of the descriptor
//    "follow": "/published/ctr",              a path to poll; optional
//    "follow_seconds": 1.0,                   the time between polls; with "follow"
//    "dense": true,                           whether the graph reads the dense weights of the
//                                             snapshots; optional
//    "unrelated": false,                      whether bases of other tables replace the state;
//                                             optional
//    "verify_bytes": 1073741824}              bases of at most this size are verified when they are
//                                             opened, others block by block before the first use;
//                                             optional
//
// Other members, such as the package that has the operators, are for people.
#ifndef DYNEMB_SERVING_DESCRIPTOR_H_
#define DYNEMB_SERVING_DESCRIPTOR_H_

#include <cstdint>
#include <string>

#include "cc/table/status.h"

namespace dynemb {

struct Descriptor {
  std::string tables;
  std::string follow;  // empty: none
  double follow_seconds = 1.0;
  bool unrelated = false;
  bool dense = false;
  uint64_t verify_bytes = uint64_t{1} << 30;  // a few tenths of a second
};

// Paths in *descriptor are absolute. DataLoss or InvalidArgument names the file.
Status ReadDescriptor(const std::string& file, Descriptor* descriptor);

// The path without links and "..", so that one place has one name.
std::string Resolved(const std::string& path);

}  // namespace dynemb

#endif  // DYNEMB_SERVING_DESCRIPTOR_H_
