// The files of an exported model beside its tables: the graph, the variables, the assets.
//
// TensorFlow verifies the checksums of variables, but not of saved_model.pb: with a damaged byte it
// may load a model that answers with other numbers. `export_saved_model` writes the sizes and the
// checksums of all files that are not rows (tf_dynemb/saved_models/checksums.py) into
// MODEL/assets.extra/tf_dynemb.checksums.json:
//
//   {"format": "tf_dynemb.model_files", "version": 1,
//    "files": [{"file": "saved_model.pb", "bytes": 1234, "crc32c": "89abcdef"}, ...],
//    "crc32c": "01234567"}   of the canonical form of the other members, as in a manifest
//
// The comparison happens when tables are opened: after TensorFlow has read the graph, and before
// the model answers.
#ifndef DYNEMB_SERVING_MODEL_FILES_H_
#define DYNEMB_SERVING_MODEL_FILES_H_

#include <string>

#include "cc/table/status.h"

namespace dynemb {

// Verifies the files of the model with this descriptor, MODEL/assets/NAME. Ok if the model has no
// checksums, or the descriptor is elsewhere. DataLoss names the file that is damaged. Files above
// 1 GiB, which are variables, are compared by their sizes. A model that was sound in the last ten
// seconds, and whose files have not changed since, is not read again: all of its tables call this.
Status VerifyModelFiles(const std::string& descriptor);

}  // namespace dynemb

#endif  // DYNEMB_SERVING_MODEL_FILES_H_
