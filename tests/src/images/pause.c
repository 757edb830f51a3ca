/* The first process of every pod: holds the namespaces, reaps orphans, ends when told. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void down(int s) { (void)s; _exit(0); }
static void reap(int s) { (void)s; while (waitpid(-1, 0, WNOHANG) > 0) { } }

int main(void) {
    struct sigaction end = {.sa_handler = down}, child = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};
    sigaction(SIGINT, &end, 0);
    sigaction(SIGTERM, &end, 0);
    sigaction(SIGCHLD, &child, 0);
    for (;;) pause();
}
