// Times cells of llama.cpp on command, in a process that keeps its model: so that pairs with the other engine can run in turn.
//
// llama_cell MODEL THREADS CONTEXT reads lines `KIND SETTING …` and answers each with `WALL_S CPU_S`:
//   prefill SETTING TOKENS          one prompt on an empty cache
//   decode SETTING DEPTH TOKENS     single tokens after DEPTH others
//   batch SETTING SEQS DEPTH TOKENS steps of SEQS sequences, DEPTH tokens behind each
// SETTING is `fa0` or `fa1`: flash attention. What is computed is what llama-bench and llama-batched-bench compute.
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "ggml-cpu.h"
#include "llama.h"

namespace {

constexpr int PROMPT_STEP = 512;

[[noreturn]] void fail(const std::string & what) {
    fprintf(stderr, "llama_cell: %s\n", what.c_str());
    std::exit(1);
}

double cpu_seconds() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](const timeval & t) { return t.tv_sec + t.tv_usec * 1e-6; };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double wall_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Cells {
  public:
    Cells(const char * path, int threads, int context) : threads(threads), context(context) {
        llama_model_params params = llama_model_default_params();
        params.n_gpu_layers = 0;
        model = llama_model_load_from_file(path, params);
        if (model == nullptr) fail(std::string("cannot load ") + path);
        vocab_size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    }

    void run(const std::string & kind, const std::string & setting, std::istream & rest) {
        const bool batch = kind == "batch";
        int seqs = 1, depth = 0, tokens = 0;
        if (batch) rest >> seqs;
        if (kind != "prefill") rest >> depth;
        rest >> tokens;
        if (!rest || tokens < 1) fail("bad command " + kind);
        llama_context * ctx = context_of(setting, seqs);
        for (int seq = 0; seq < seqs; seq++) fill(ctx, seq, depth);
        const double wall = wall_seconds(), cpu = cpu_seconds();
        if (kind == "prefill") {
            feed(ctx, 0, 0, tokens);
        } else {
            for (int i = 0; i < tokens; i++) step(ctx, seqs, depth + i);
        }
        llama_synchronize(ctx);
        printf("%.9f %.9f\n", wall_seconds() - wall, cpu_seconds() - cpu);
        fflush(stdout);
    }

  private:
    // One context a setting and number of sequences: a depth that was reached once stays.
    llama_context * context_of(const std::string & setting, int seqs) {
        llama_context *& ctx = contexts[{setting, seqs}];
        if (ctx != nullptr) return ctx;
        llama_context_params params = llama_context_default_params();
        params.n_ctx = seqs > 1 ? seqs * 512 : context;
        params.n_batch = 2048;
        params.n_ubatch = PROMPT_STEP;
        params.n_seq_max = seqs;
        params.n_threads = threads;
        params.n_threads_batch = threads;
        params.flash_attn_type = setting == "fa1" ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.no_perf = true;
        params.kv_unified = false;
        ctx = llama_init_from_model(model, params);
        if (ctx == nullptr) fail("no context");
        ggml_threadpool_params pool = ggml_threadpool_params_default(threads);
        llama_attach_threadpool(ctx, ggml_threadpool_new(&pool), nullptr);
        step(ctx, 1, 0);  // warm
        llama_memory_clear(llama_get_memory(ctx), true);
        return ctx;
    }

    // Makes `seq` exactly `depth` tokens long.
    void fill(llama_context * ctx, int seq, int depth) {
        llama_memory_t memory = llama_get_memory(ctx);
        llama_memory_seq_rm(memory, seq, depth, -1);
        feed(ctx, seq, llama_memory_seq_pos_max(memory, seq) + 1, depth);
    }

    // Tokens `from..to` of a prompt; logits of the last alone.
    void feed(llama_context * ctx, int seq, int from, int to) {
        while (from < to) {
            const int count = std::min(PROMPT_STEP, to - from);
            llama_batch batch = llama_batch_init(count, 0, 1);
            for (int i = 0; i < count; i++) add(batch, from + i, seq, from + i + 1 == to);
            decode(ctx, batch);
            from += count;
        }
    }

    void step(llama_context * ctx, int seqs, int pos) {
        llama_batch batch = llama_batch_init(seqs, 0, 1);
        for (int seq = 0; seq < seqs; seq++) add(batch, pos, seq, true);
        decode(ctx, batch);
    }

    void add(llama_batch & batch, int pos, int seq, bool logits) {
        const int i = batch.n_tokens++;
        random = random * 6364136223846793005ULL + 1442695040888963407ULL;
        batch.token[i] = static_cast<llama_token>((random >> 33) % vocab_size);
        batch.pos[i] = pos;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i] = logits;
    }

    void decode(llama_context * ctx, llama_batch & batch) {
        if (llama_decode(ctx, batch) != 0) fail("llama_decode failed");
        llama_synchronize(ctx);
        llama_batch_free(batch);
    }

    int threads, context, vocab_size = 0;
    unsigned long long random = 1;
    llama_model * model = nullptr;
    std::map<std::pair<std::string, int>, llama_context *> contexts;
};

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 4) fail("usage: llama_cell MODEL THREADS CONTEXT");
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    Cells cells(argv[1], std::atoi(argv[2]), std::atoi(argv[3]));
    puts("ready");
    fflush(stdout);
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string kind, setting;
        words >> kind >> setting;
        cells.run(kind, setting, words);
    }
}
