/* Truebeat heartbeat page, layout version 1: a writer for C and C++ in one header.
 *
 * An engine says in a small shared file what it is doing; the agent reads it without trusting it. The rules (H1 to H9) and every
 * offset are in docs/contracts/heartbeat.md, and the golden bytes of heartbeat/tests/golden hold this header to them. Linux only;
 * needs a C99 or C++11 compiler with the __atomic builtins (gcc, clang) and nothing else. With strict -std=c99 or -std=c11 define
 * _POSIX_C_SOURCE as 200809L before the first include of your file; -std=gnu99 and C++ need no such thing.
 *
 *     struct tb_identity who;
 *     struct tb_writer page = {0};                          // all zeros (C++: {}): a writer without a page
 *     int err = tb_identity_of_this_process(&who, rank, world_size);
 *     if (err == 0) err = tb_open(&page, NULL, &who);       // once, at start; err is an errno value, 0 is success
 *     ...
 *     tb_publish(&page, &beat);                             // before and after each step
 *     tb_record(&page, &record);                            // after each step
 *
 * Bounds: tb_publish is 12 payload words and two of sequence, 14 stores and one fence (35 instructions with gcc -O2 on x86-64);
 * tb_record is 6 and two. No loop, lock, allocation or system call (H7); the caller reads the clock (tb_now_ns). One
 * thread at a time may publish to a page. A writer of zeros that was never opened, or whose tb_open failed, may be published to and
 * closed all the same: nothing happens, so an engine needs no second code path for "no page". After fork() the child must tb_open a
 * page of its own or leave it alone.
 */
#ifndef TRUEBEAT_HEARTBEAT_H
#define TRUEBEAT_HEARTBEAT_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define TB_VERSION 1u
#define TB_HEADER_LEN 4096u
#define TB_RING_LEN 256u
#define TB_RECORD_LEN 64u
#define TB_FILE_LEN (TB_HEADER_LEN + TB_RING_LEN * TB_RECORD_LEN)
#define TB_BEAT_OFFSET 256u
#define TB_GPUS_MAX 8u

/* H5: what the engine is doing. */
enum tb_phase {
    TB_LOAD = 1, TB_COMPILE = 2, TB_CAPTURE = 3, TB_WARM_UP = 4, TB_IDLE = 5, TB_PREFILL = 6, TB_DECODE = 7, TB_SLEEP = 8, TB_DRAIN = 9
};

/* H6: how a step ended. */
enum tb_outcome { TB_OK = 1, TB_FAILED = 2, TB_DEADLINE_EXCEEDED = 3 };

/* H2: whose page it is. pid 1 to 2^31-1; rank < world_size, which the data-parallel engines (0: one) share out evenly; at most TB_GPUS_MAX
 * GPUs. */
struct tb_identity {
    uint32_t pid, rank, world_size, gpu_count;
    uint64_t pid_start_ticks, nonce;
    uint8_t boot_id[16];
    uint8_t gpu_uuids[TB_GPUS_MAX][16];
    uint32_t engines;
};

/* H3 to H5, published as one unit. Times are nanoseconds of CLOCK_MONOTONIC; no time may be after published_ns, no counter may go back. */
struct tb_beat {
    uint64_t steps_completed, tokens_delivered, requests_finished;
    uint32_t running, waiting;
    uint64_t prompt_tokens_owed;
    uint32_t phase, phase_tokens;
    uint64_t phase_entered_ns;
    uint32_t lease_ms;
    uint64_t step_started_ns, work_done, work_total, published_ns;
};

/* H6: one line of the flight recorder. */
struct tb_record {
    uint64_t step, started_ns, ended_ns;
    uint32_t requests, prefill_tokens, decode_tokens, outcome;
    uint64_t graph_key;
};

/* The one writer of a page (H7). `words` is NULL where there is no page. The sequences are kept here and never read back. */
struct tb_writer {
    uint64_t *words;
    uint64_t beat_seq, records;
};

/* CLOCK_MONOTONIC in nanoseconds: the clock of every time in a page. */
static inline uint64_t tb_now_ns(void) {
    struct timespec now;
    return clock_gettime(CLOCK_MONOTONIC, &now) == 0 ? (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec : 0;
}

static inline uint64_t tb__le64(uint64_t value) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return __builtin_bswap64(value);
#else
    return value;
#endif
}

static inline uint64_t tb__pair(uint32_t low, uint32_t high) { return (uint64_t)low | (uint64_t)high << 32; }

static inline void tb__store(uint64_t *word, uint64_t value) { __atomic_store_n(word, tb__le64(value), __ATOMIC_RELAXED); }

/* H7.2: the odd sequence; a release fence; (the payload;) the next even sequence with release order. */
static inline void tb__begin(uint64_t *slot, uint64_t seq) {
    tb__store(slot, seq - 1u);
    __atomic_thread_fence(__ATOMIC_RELEASE);
}
static inline void tb__end(uint64_t *slot, uint64_t seq) { __atomic_store_n(slot, tb__le64(seq), __ATOMIC_RELEASE); }

/* Makes *beat the page's state, as one unit. Wait-free (H7.1). */
static inline void tb_publish(struct tb_writer *writer, const struct tb_beat *beat) {
    const uint64_t seq = writer->beat_seq += 2u;
    if (writer->words == NULL) return;
    uint64_t *slot = writer->words + TB_BEAT_OFFSET / 8u;
    tb__begin(slot, seq);
    tb__store(slot + 1, beat->steps_completed);
    tb__store(slot + 2, beat->tokens_delivered);
    tb__store(slot + 3, beat->requests_finished);
    tb__store(slot + 4, tb__pair(beat->running, beat->waiting));
    tb__store(slot + 5, beat->prompt_tokens_owed);
    tb__store(slot + 6, tb__pair(beat->phase, beat->phase_tokens));
    tb__store(slot + 7, beat->phase_entered_ns);
    tb__store(slot + 8, tb__pair(beat->lease_ms, 0));
    tb__store(slot + 9, beat->step_started_ns);
    tb__store(slot + 10, beat->work_done);
    tb__store(slot + 11, beat->work_total);
    tb__store(slot + 12, beat->published_ns);
    tb__end(slot, seq);
}

/* Adds a line to the flight recorder, over the oldest of the last 256 (H6.1). Wait-free. */
static inline void tb_record(struct tb_writer *writer, const struct tb_record *record) {
    const uint64_t index = writer->records++, seq = 2u * writer->records;
    if (writer->words == NULL) return;
    uint64_t *slot = writer->words + TB_HEADER_LEN / 8u + index % TB_RING_LEN * (TB_RECORD_LEN / 8u);
    tb__begin(slot, seq);
    tb__store(slot + 1, record->step);
    tb__store(slot + 2, record->started_ns);
    tb__store(slot + 3, record->ended_ns);
    tb__store(slot + 4, tb__pair(record->requests, record->prefill_tokens));
    tb__store(slot + 5, tb__pair(record->decode_tokens, record->outcome));
    tb__store(slot + 6, record->graph_key);
    tb__end(slot, seq);
}

static inline void tb__put(uint8_t *page, size_t at, uint64_t value, size_t len) {
    for (size_t i = 0; i < len; i++) page[at + i] = (uint8_t)(value >> (8u * i));
}

/* The file before its first beat: identity in place, all sequence words 0 (H1.3). */
static inline void tb__fresh(uint8_t *page, const struct tb_identity *who) {
    const uint32_t head[] = {TB_VERSION, TB_HEADER_LEN, TB_FILE_LEN, TB_RING_LEN, TB_RECORD_LEN, who->gpu_count, who->pid, who->rank, who->world_size, who->engines};
    memset(page, 0, TB_FILE_LEN);
    memcpy(page, "TRUEBEAT", 8);
    for (size_t i = 0; i < sizeof head / sizeof head[0]; i++) tb__put(page, 8u + 4u * i, head[i], 4);
    tb__put(page, 48, who->pid_start_ticks, 8);
    tb__put(page, 56, who->nonce, 8);
    memcpy(page + 64, who->boot_id, sizeof who->boot_id);
    for (size_t i = 0; i < who->gpu_count; i++) memcpy(page + 80u + 16u * i, who->gpu_uuids[i], 16);
}

static inline int tb__read_text(const char *path, char *text, size_t size) {
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return errno;
    const ssize_t got = read(file, text, size - 1u);
    const int err = got < 0 ? errno : 0;
    close(file);
    text[got < 0 ? 0 : got] = '\0';
    return err;
}

/* The identity of the calling process, without GPUs; the nonce is TRUEBEAT_NONCE, or 0. Returns 0 or an errno value. */
static inline int tb_identity_of_this_process(struct tb_identity *who, uint32_t rank, uint32_t world_size) {
    char text[1024];
    memset(who, 0, sizeof *who);
    who->pid = (uint32_t)getpid();
    who->rank = rank;
    who->world_size = world_size;
    const char *nonce = getenv("TRUEBEAT_NONCE");
    who->nonce = nonce != NULL ? strtoull(nonce, NULL, 10) : 0;
    int err = tb__read_text("/proc/self/stat", text, sizeof text);
    if (err != 0) return err;
    const char *at = strrchr(text, ')'); /* the name before it may hold spaces and brackets; field 3 follows */
    for (int field = 2; at != NULL && field < 22; field++) at = strchr(at + 1, ' ');
    if (at == NULL) return EPROTO;
    who->pid_start_ticks = strtoull(at, NULL, 10);
    err = tb__read_text("/proc/sys/kernel/random/boot_id", text, sizeof text);
    if (err != 0) return err;
    size_t digits = 0;
    for (const char *c = text; *c != '\0' && *c != '\n' && digits < 32; c++) {
        const char *hex = "0123456789abcdef", *found = strchr(hex, *c);
        if (*c == '-') continue;
        if (found == NULL) return EPROTO;
        who->boot_id[digits / 2u] = (uint8_t)(who->boot_id[digits / 2u] << 4 | (found - hex));
        digits++;
    }
    return digits == 32 ? 0 : EPROTO;
}

static inline int tb__write_all(int file, const uint8_t *bytes, size_t len) {
    while (len > 0) {
        const ssize_t wrote = write(file, bytes, len);
        if (wrote < 0 && errno != EINTR) return errno;
        if (wrote > 0) bytes += wrote, len -= (size_t)wrote;
    }
    return 0;
}

/* Makes rank-<n>.beat in `dir` (NULL: TRUEBEAT_PAGE_DIR, or /run/truebeat), over an older one and whole at once (H1.3), and maps it.
 * Returns 0 or an errno value; the writer is then one without a page. */
static inline int tb_open(struct tb_writer *writer, const char *dir, const struct tb_identity *who) {
    char path[512], temp[544];
    memset(writer, 0, sizeof *writer);
    if (who->pid == 0 || who->pid > INT32_MAX || who->world_size == 0 || who->rank >= who->world_size || who->gpu_count > TB_GPUS_MAX ||
        (who->engines > 1 && who->world_size % who->engines != 0))
        return EINVAL; /* H2.4 */
    if (dir == NULL) dir = getenv("TRUEBEAT_PAGE_DIR");
    if (dir == NULL || *dir == '\0') dir = "/run/truebeat";
    const int length = snprintf(path, sizeof path, "%s/rank-%u.beat", dir, who->rank);
    if (length < 0 || (size_t)length >= sizeof path) return ENAMETOOLONG;
    snprintf(temp, sizeof temp, "%s/.rank-%u.beat.%ld.tmp", dir, who->rank, (long)getpid());
    unlink(temp); /* a leftover of an earlier process with this pid */
    uint8_t *fresh = (uint8_t *)malloc(TB_FILE_LEN);
    if (fresh == NULL) return ENOMEM;
    tb__fresh(fresh, who);
    const int file = open(temp, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0640);
    int err = file < 0 ? errno : tb__write_all(file, fresh, TB_FILE_LEN); /* real bytes: a hole on a full tmpfs is a SIGBUS later */
    free(fresh);
    void *map = err == 0 ? mmap(NULL, TB_FILE_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    if (err == 0 && map == MAP_FAILED) err = errno;
    if (err == 0 && rename(temp, path) != 0) err = errno;
    if (file >= 0) close(file);
    if (err == 0) {
        writer->words = (uint64_t *)map;
    } else {
        if (map != MAP_FAILED) munmap(map, TB_FILE_LEN);
        unlink(temp);
    }
    return err;
}

/* Lets go of the mapping. The file stays: it is evidence, and stale once the process is gone. */
static inline void tb_close(struct tb_writer *writer) {
    if (writer->words != NULL) munmap(writer->words, TB_FILE_LEN);
    writer->words = NULL;
}

#endif
