// ProcessState: the one object of a type that all tables of a process share.
//
// It is made when it is first needed, and never destroyed: tables may live until the process exits.
//
// A child of fork has a copy of it. `State` has a member `mutex`, which protects the others: no
// thread that does not exist in the child has it there. Then InChild() is called, which replaces
// the condition variables that such threads may have waited for. fork takes the mutexes in the
// reverse of the order in which the objects were made. So who takes two of them makes the object of
// the second one first.
#ifndef DYNEMB_TABLE_PROCESS_STATE_H_
#define DYNEMB_TABLE_PROCESS_STATE_H_

#include <pthread.h>

namespace dynemb {

template <class State>
State& ProcessState() {
  static State* const state = [] {
    static State* const made = new State;
    (void)pthread_atfork([] { made->mutex.lock(); }, [] { made->mutex.unlock(); },
                         [] {
                           made->mutex.unlock();
                           made->InChild();
                         });
    return made;
  }();
  return *state;
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_PROCESS_STATE_H_
