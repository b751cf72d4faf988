// FunctionRef: a reference to a function object, which must outlive it. Unlike std::function it
// allocates nothing.
#ifndef DYNEMB_TABLE_FUNCTION_REF_H_
#define DYNEMB_TABLE_FUNCTION_REF_H_

#include <type_traits>

namespace dynemb {

template <class Signature>
class FunctionRef;

template <class Result, class... Args>
class FunctionRef<Result(Args...)> {
 public:
  template <class Fn, class = std::enable_if_t<!std::is_same_v<std::decay_t<Fn>, FunctionRef>>>
  FunctionRef(const Fn& fn)  // NOLINT(runtime/explicit): lambdas are passed directly
      : object_(&fn), call_([](const void* object, Args... args) -> Result {
          return (*static_cast<const Fn*>(object))(args...);
        }) {}
  Result operator()(Args... args) const { return call_(object_, args...); }

 private:
  const void* object_;
  Result (*call_)(const void* object, Args... args);
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_FUNCTION_REF_H_
