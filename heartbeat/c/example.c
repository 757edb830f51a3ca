/* A pretend engine that publishes a heartbeat page: what a C or C++ engine has to do, and no more.
 *
 *     cc -std=c99 -O2 -o example example.c && TRUEBEAT_PAGE_DIR=/tmp ./example 1000 5
 *
 * Arguments: steps, milliseconds a step. It ends with its page in phase idle, and waits for end of file on standard input: a reader
 * may look at the page while the process lives.
 */
#define _POSIX_C_SOURCE 200809L
#include "truebeat_heartbeat.h"

/* How long one step may last at most, as far as this engine knows (H5.3). */
#define STEP_LEASE_MS 1000u

static void run_step(long step_ms) {
    const struct timespec pause = {step_ms / 1000, step_ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

int main(int argc, char **argv) {
    const unsigned long steps = argc > 1 ? strtoul(argv[1], NULL, 10) : 1000;
    const long step_ms = argc > 2 ? strtol(argv[2], NULL, 10) : 5;
    struct tb_identity who;
    struct tb_writer page = {0};
    struct tb_beat beat = {0};

    int err = tb_identity_of_this_process(&who, 0, 1);
    if (err == 0) err = tb_open(&page, NULL, &who);
    if (err != 0) {
        fprintf(stderr, "no heartbeat page: %s; is TRUEBEAT_PAGE_DIR a directory that may be written?\n", strerror(err));
        return 1;
    }
    beat.phase = TB_DECODE;
    beat.phase_entered_ns = tb_now_ns();
    beat.lease_ms = STEP_LEASE_MS;
    beat.running = 4;
    for (unsigned long step = 1; step <= steps; step++) {
        beat.step_started_ns = beat.published_ns = tb_now_ns();
        tb_publish(&page, &beat);
        run_step(step_ms);
        const uint64_t ended_ns = tb_now_ns();
        const struct tb_record line = {step, beat.step_started_ns, ended_ns, beat.running, 0, beat.running, TB_OK, 0};
        tb_record(&page, &line);
        beat.steps_completed = step;
        beat.tokens_delivered += beat.running;
        beat.step_started_ns = 0;
        beat.published_ns = ended_ns;
        tb_publish(&page, &beat);
    }
    beat.phase = TB_IDLE;
    beat.running = 0;
    beat.requests_finished = 4;
    beat.phase_entered_ns = beat.published_ns = tb_now_ns();
    tb_publish(&page, &beat);
    while (getchar() != EOF) {
    }
    tb_close(&page);
    return 0;
}
