"""The core never notices the plugin: hooks that are missing, errors, engines of another kind; and which page is whose."""
import logging
import os
import sys
import unittest
import unittest.mock

import fake
from cored import Cored
from look import records


class UnharmedTest(Cored):
    def test_the_log_goes_where_an_agent_reads_it(self):
        path = os.path.join(self.dir, "engine.log")
        logger = logging.getLogger("vllm")
        logger.addHandler(logging.NullHandler())  # vLLM has configured its logger before it loads a plugin
        self.addCleanup(logger.handlers.clear)
        with unittest.mock.patch.dict(os.environ, {"TRUEBEAT_LOG_FILE": path}):
            self.engine("0.32.0")
        logging.getLogger("vllm.v1.engine.core").error("EngineCore encountered a fatal error.")
        with open(path, encoding="utf-8") as file:
            self.assertEqual(file.read().count("EngineCore encountered a fatal error."), 1)

    def test_the_executor_gets_what_the_core_gave_it(self):
        got = []

        def before(modules):
            def execute_model(self, scheduler_output, non_block=False):
                got.append((scheduler_output, non_block))
            modules["vllm.v1.executor.abstract"].Executor.execute_model = execute_model

        engine, core = self.engine("0.32.0", before=before)
        engine.add_request(core.Request("a", 1, 9))
        engine._process_engine_step()
        output, non_block = got.pop()
        self.assertEqual((output.total_num_scheduled_tokens, non_block), (1, True))
        engine.model_executor.execute_model(scheduler_output=output)
        engine.model_executor.execute_model(output, True)
        self.assertEqual(got, [(output, False), (output, True)])

    def test_of_a_page_that_is_withdrawn_nothing_is_kept(self):
        engine, core = self.engine("0.32.0")
        engine.add_request(core.Request("a", 1, 10**6))
        engine._process_engine_step()
        beat = sys.modules["truebeat_heartbeat.vllm_core"]._beat
        beat.gives_up("on trial")
        for _ in range(50):
            engine._process_engine_step()
        self.assertEqual((len(beat.flight), os.path.exists(beat.path)), (0, False))

    def test_a_step_that_takes_more_than_itself_is_called_as_it_was(self):
        got = []

        def before(modules):
            def _process_engine_step(self, *args, deep=False):
                got.append((args, deep))
                self.step_fn()
                return "done"

            def execute_model(self, scheduler_output, block, *, flag):
                got.append((block, flag))
                return "output"
            modules["vllm.v1.engine.core"].EngineCoreProc._process_engine_step = _process_engine_step
            modules["vllm.v1.executor.abstract"].Executor.execute_model = execute_model

        engine, core = self.engine("0.32.0", before=before)
        model = engine.model_executor
        engine.step_fn = lambda: model.execute_model(engine.scheduler.schedule(), 7, flag="x")
        engine.add_request(core.Request("a", 4, 9))
        self.assertEqual(engine._process_engine_step("wide", deep=True), "done")
        self.assertEqual(got, [(("wide",), True), (7, "x")])
        self.assertEqual((self.page()["steps_completed"], self.page()["phase"]), (1, "decode"))

    def test_a_step_that_fails_reaches_vllm_and_the_ring(self):
        engine, core = self.engine("0.32.0")

        def fails(output):
            raise RuntimeError("vLLM's own")
        engine.add_request(core.Request("a", 10, 3))
        engine.scheduler.update_from_output = fails
        with self.assertRaisesRegex(RuntimeError, "vLLM's own"):
            engine._process_engine_step()
        self.assertEqual(records(os.path.join(self.dir, "rank-0.beat"))[-1]["outcome"], 2)

    def test_an_error_of_ours_costs_the_page_and_not_the_engine(self):
        for broken in ("waiting", "running"):
            with self.subTest(broken=broken):
                engine, core = self.engine("0.32.0")
                engine.add_request(core.Request("a", 10, 2))
                engine._process_engine_step()
                self.assertEqual(self.pages(), ["rank-0.beat"])
                kept = engine.scheduler
                engine.scheduler = Without(kept, broken)
                engine._process_engine_step()
                self.assertEqual(kept.requests, {}, "the engine went on")
                self.assertEqual(self.pages(), [])
                self.assertTrue(any("withdrawn" in line for line in self.told))

    def test_missing_hooks_are_told_and_without_the_essential_ones_there_is_no_page(self):
        cases = (("EngineCoreProc", "_process_engine_step", []), ("EngineCoreProc", "run_busy_loop", []),
                 ("EngineCore", "step_with_batch_queue", []), ("EngineCore", "add_request", ["rank-0.beat"]))
        for cls, name, pages in cases:
            with self.subTest(name=name):
                self.told.clear()

                def rename(modules, cls=cls, name=name):
                    owner = getattr(modules["vllm.v1.engine.core"], cls)
                    setattr(owner, "other", vars(owner)[name])
                    delattr(owner, name)
                engine, _ = self.engine("0.32.0", before=rename)
                self.assertIn(name, " ".join(line for line in self.told if "hook missing" in line))
                self.assertEqual(self.pages(), pages)
                self.assertTrue(hasattr(engine, "other"))
                for page in pages:
                    os.unlink(os.path.join(self.dir, page))

    def test_a_core_that_its_client_steps_has_no_page(self):
        for name in ("UniProcExecutor", "MultiprocExecutor"):
            with self.subTest(name=name):
                _, (executor, core, _, gpu) = fake.load("0.32.0", self.dir)
                engine = core.EngineCore(fake.config(), getattr(executor, name))
                if name == "UniProcExecutor":
                    gpu.Worker(fake.config(), 0, 0)
                self.assertEqual(self.pages(), [])
                engine.add_request(core.Request("a", 10, 2))
                engine.sleep()
                engine.wake_up()
                for _ in range(2):
                    engine.step_fn()
                self.assertEqual((engine.scheduler.requests, self.pages()), ({}, []))

    def test_a_core_of_another_platform_is_idle_once_its_own_loop_begins(self):
        _, (_, core, _, _) = fake.load("0.32.0", self.dir)

        class BalancedCore(core.EngineCoreProc):
            def run_busy_loop(self):
                pass
        engine = BalancedCore(fake.config())
        self.assertEqual(self.page()["phase"], "warm-up")
        engine.run_busy_loop()
        self.one_way(engine, core, False)

    def test_a_core_whose_steps_are_not_those_that_are_hooked_has_no_page(self):
        for name in ("_process_engine_step", "step", "step_with_batch_queue"):
            with self.subTest(name=name):
                self.told.clear()
                _, (_, core, _, _) = fake.load("0.32.0", self.dir)
                kind = type("OtherCore", (core.EngineCoreProc,), {name: lambda self: None})
                kind(fake.config()).run_busy_loop()
                self.assertEqual(self.pages(), [])
                self.assertIn("OtherCore has a %s of its own" % name, " ".join(self.told))

    def test_no_page_directory_is_no_hooks_and_one_that_cannot_be_written_is_no_page(self):
        plugin, _ = fake.load("0.32.0", os.path.join(self.dir, "none"))
        plugin.register()
        self.assertTrue(any("will not dump" in line for line in self.told))
        engine, core = self.engine("0.32.0")
        os.environ["TRUEBEAT_PAGE_DIR"] = os.path.join(self.dir, "none")
        self.addCleanup(os.environ.pop, "TRUEBEAT_PAGE_DIR")
        engine = core.EngineCoreProc(fake.config())
        engine.add_request(core.Request("a", 10, 1))
        engine._process_engine_step()
        self.assertTrue(any("has no page" in line for line in self.told))

    def test_a_forked_child_leaves_its_parent_s_page_alone_and_answers_for_itself(self):
        engine, core = self.engine("0.32.0")
        engine.add_request(core.Request("a", 10, 5))
        engine._process_engine_step()
        before = self.page()
        child = os.fork()
        if child == 0:
            engine._process_engine_step()
            os._exit(0 if os.path.exists(os.path.join(self.dir, "stacks-%d.ready" % os.getpid())) else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(self.page(), before)

    def test_data_parallel_engines_follow_one_another(self):
        _, (_, core, _, gpu) = fake.load("0.32.0", self.dir)
        core.EngineCoreProc(fake.config(world_size=2, engines=2, engine=1))
        self.assertEqual((self.pages(), self.page(3)["world_size"], self.page(3)["engines"]), (["rank-3.beat"], 6, 2))

    def test_the_engines_of_a_dense_model_are_told_apart_by_their_index_alone(self):
        _, (_, core, _, gpu) = fake.load("0.32.0", self.dir)
        config = fake.config(world_size=2)
        config.parallel_config.data_parallel_index = 1
        core.EngineCoreProc(config)
        self.assertEqual((self.pages(), self.page(3)["engines"]), (["rank-3.beat"], 2))


class Without:
    """An object without one of its attributes, for us; vLLM's own calls go to the whole one."""

    def __init__(self, whole, name):
        self._whole, self._name = whole, name

    def __getattr__(self, name):
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._whole, name)


if __name__ == "__main__":
    unittest.main()
