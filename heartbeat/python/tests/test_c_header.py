"""What the C header's comment tells an engine to do is harmless where there is no page: every call, with a writer that was never opened."""
import os
import re
import subprocess
import tempfile
import unittest

C = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "c")
FLAGS = ["-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O0", "-Wall", "-Wextra", "-I", C]
# what nobody has set is rubbish, as it may be on any stack; older compilers leave there what lies there
RUBBISH = "-ftrivial-auto-var-init=pattern"
ENGINE = """
#include "truebeat_heartbeat.h"
static int no_proc(struct tb_identity *who) { memset(who, 0, sizeof *who); return EPROTO; }
#define tb_identity_of_this_process(who, rank, world_size) no_proc(who)
int main(void) {
    const struct tb_beat beat = {0};
    const struct tb_record record = {0};
%s
    tb_close(&page);
    tb_close(&page);
    return err == EPROTO ? 0 : 1;
}
"""


class HeaderTest(unittest.TestCase):
    def setUp(self):
        kept = tempfile.TemporaryDirectory()
        self.addCleanup(kept.cleanup)
        self.dir = kept.name

    def built(self, source, *flags):
        program = os.path.join(self.dir, "engine")
        knows = subprocess.run(["cc", RUBBISH, "-E", "-x", "c", os.devnull], capture_output=True, check=False).returncode == 0
        command = ["cc", *FLAGS, *([RUBBISH] if knows else []), *flags, "-o", program, source]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(made.returncode, 0, made.stderr)
        return program

    def runs(self, program, *args):
        env = dict(os.environ, TRUEBEAT_PAGE_DIR=self.dir)
        return subprocess.run([program, *args], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)

    def test_what_the_comment_says_is_harmless_where_the_process_cannot_be_identified(self):
        with open(os.path.join(C, "truebeat_heartbeat.h"), encoding="utf-8") as file:
            comment = file.read().partition("*/")[0]
        lines = [line[len(" *     "):] for line in comment.splitlines() if line.startswith(" *     ")]
        self.assertEqual(sum("tb_" in line for line in lines), 6, lines)
        source = os.path.join(self.dir, "engine.c")
        with open(source, "w", encoding="utf-8") as file:
            file.write(ENGINE % "\n".join(line for line in lines if line != "..."))
        ran = self.runs(self.built(source))
        self.assertEqual((ran.returncode, [name for name in os.listdir(self.dir) if name.endswith(".beat")]), (0, []))

    def test_the_example_begins_with_a_writer_without_a_page(self):
        with open(os.path.join(C, "example.c"), encoding="utf-8") as file:
            self.assertRegex(file.read(), re.escape("struct tb_writer page = {0};"))
        program = self.built(os.path.join(C, "example.c"), "-Werror")
        self.assertEqual(self.runs(program, "3", "0").returncode, 0)
        self.assertTrue(os.path.exists(os.path.join(self.dir, "rank-0.beat")))


if __name__ == "__main__":
    unittest.main()
