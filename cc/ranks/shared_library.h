// SharedLibrary: the functions of a library that is found when the process runs.
#ifndef DYNEMB_RANKS_SHARED_LIBRARY_H_
#define DYNEMB_RANKS_SHARED_LIBRARY_H_

#include <dlfcn.h>

#include <string>
#include <type_traits>

#include "cc/table/status.h"

namespace dynemb {

// The library stays loaded when the object is gone: others of the process may use it.
class SharedLibrary {
 public:
  // `name` is a name or a path for dlopen, and `flags` are its flags.
  SharedLibrary(const std::string& name, int flags)
      : name_(name), loaded_(dlopen(name.c_str(), flags)) {
    if (loaded_ == nullptr) status_ = FailedPrecondition(dlerror());
  }

  // Whether the library is loaded, and has all symbols that were looked up.
  const Status& status() const { return status_; }

  bool Has(const char* symbol) const {
    return loaded_ != nullptr && dlsym(loaded_, symbol) != nullptr;
  }

  // Sets *found, a pointer to a function or another address, to a symbol.
  template <class T>
  void Find(T* found, const char* symbol) {
    if (loaded_ == nullptr) return;
    void* const address = dlsym(loaded_, symbol);
    if (address == nullptr && status_.ok()) {
      status_ = FailedPrecondition(name_ + " has no " + symbol);
    }
    *found = reinterpret_cast<std::decay_t<T>>(address);
  }

 private:
  const std::string name_;
  void* const loaded_;
  Status status_;
};

}  // namespace dynemb

#endif  // DYNEMB_RANKS_SHARED_LIBRARY_H_
