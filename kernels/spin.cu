// The fault of S2 as a real kernel: it spins until somebody sets its flag, and nobody does. For `make test-gpu` and for signatures of a busy
// and cold device; no step launches it.
#include "common.cuh"

// Ends when *flag is not zero.
KERNEL spin(const volatile uint32_t *flag) {
    follow();
    while (*flag == 0) {
    }
}
