"""The plugin against the same fakes: what the workers' pages say."""
import importlib
import os
import sys
import unittest
import unittest.mock
from types import SimpleNamespace

import fake
from look import look, records
from plugged import Plugged


class WorkerTest(Plugged):
    def worker(self, version, rank=1, config=None):
        _, (_, core, base, gpu) = fake.load(version, self.dir)
        worker = gpu.Worker(config or fake.config(2), 0, rank)
        worker.load_model()
        return base.WorkerWrapperBase(worker), worker, core

    def test_workers_write_their_own_pages_in_every_version(self):
        for version in fake.VERSIONS:
            with self.subTest(version=version):
                wrapper, worker, core = self.worker(version)
                seen = self.page(2)
                self.assertEqual((seen["phase"], seen["rank"], seen["world_size"]), ("load", 2, 3))
                scheduler, warm_up = core.Scheduler(), core.Scheduler()
                warm_up.waiting += [core.Request("warm-up", 700, 1)]
                wrapper.execute_model(warm_up.schedule())  # a warm-up through the same door counts for nothing
                scheduler.waiting += [core.Request("a", 700, 3), core.Request("b", 1, 2)]
                wrapper.compile_or_warm_up_model()
                self.assertEqual((self.page(2)["phase"], self.page(2)["steps_completed"]), ("idle", 0))
                during = []
                worker.model_runner.during = lambda: during.append(self.page(2))
                for _ in range(2):
                    if wrapper.execute_model(scheduler.schedule()) is None:
                        self.assertGreater(self.page(2)["step_started_ns"], 0, "sampling is a part of the step")
                        wrapper.sample_tokens(None)
                self.assertEqual((during[0]["phase"], during[0]["running"], during[0]["phase_tokens"]), ("prefill", 2, 511))
                seen = self.page(2)
                self.assertEqual((seen["phase"], seen["steps_completed"], seen["step_started_ns"]), ("idle", 2, 0))
                self.assertEqual([line for line in self.told if "missing" in line or "withdrawn" in line], [])

    def test_a_step_whose_sampling_fails_has_failed(self):
        wrapper, worker, core = self.worker("0.32.0")
        wrapper.compile_or_warm_up_model()
        worker.model_runner.sampled = None
        scheduler = core.Scheduler()
        scheduler.waiting += [core.Request("a", 1, 2)]
        wrapper.execute_model(scheduler.schedule())
        with self.assertRaises(TypeError):
            wrapper.sample_tokens(None)
        self.assertEqual(records(os.path.join(self.dir, "rank-2.beat"))[-1]["outcome"], 2)

    def test_an_error_of_ours_costs_the_page_and_not_the_worker(self):
        for broken in ("begins", "ends", "enters", "leaves"):
            with self.subTest(broken=broken):
                wrapper, worker, core = self.worker("0.32.0")
                wrapper.compile_or_warm_up_model()
                scheduler = core.Scheduler()
                scheduler.waiting += [core.Request("a", 1, 9)]
                kind = type(sys.modules["truebeat_heartbeat.vllm_worker"]._beat)
                with unittest.mock.patch.object(kind, broken, side_effect=KeyError("ours")):
                    self.assertEqual((wrapper.execute_model(scheduler.schedule()), wrapper.sample_tokens(None)), (None, "output"))
                    self.assertIsNone(wrapper.sleep())
                self.assertEqual(self.pages(), [])
                wrapper.wake_up()
                self.assertEqual((wrapper.execute_model(scheduler.schedule()), wrapper.sample_tokens(None)), (None, "output"))
                self.assertEqual(sum("withdrawn" in line for line in self.told), 1)
                self.told.clear()

    def test_a_worker_that_serves_comes_back_from_a_phase_of_the_start(self):
        wrapper, worker, _ = self.worker("0.32.0")
        wrapper.compile_or_warm_up_model()
        for again in (wrapper.load_model, wrapper.determine_available_memory, worker.model_runner.capture_model,
                      wrapper.compile_or_warm_up_model):
            with self.subTest(again=again.__name__):
                again()
                self.assertEqual(self.page(2)["phase"], "idle")

    def test_the_capture_of_graphs_within_the_warm_up_is_a_phase_of_its_own(self):
        for version in fake.VERSIONS:
            for fails in (False, True):
                with self.subTest(version=version, fails=fails):
                    wrapper, worker, _ = self.worker(version)
                    said = self.phases(worker, fails)
                    try:
                        wrapper.compile_or_warm_up_model()
                    except MemoryError:
                        self.assertTrue(fails)
                    self.assertEqual(said, ["warm-up", "capture", "warm-up"])
                    self.assertEqual(self.page(2)["phase"], "warm-up" if fails else "idle")

    def phases(self, worker, fails):
        """What the page says before, during and after the capture, which is one call of several of the warm-up."""
        said, runner = [], worker.model_runner
        capture = runner.capture_model

        def captures():
            said.append(self.page(2)["phase"])
            if fails:
                raise MemoryError("vLLM's own")

        def capture_model():
            said.append(self.page(2)["phase"])
            try:
                capture()
            finally:
                said.append(self.page(2)["phase"])
        runner.captures, runner.capture_model = captures, capture_model
        return said

    def test_a_worker_that_serves_is_idle_whatever_it_called_and_however_that_ended(self):
        wrapper, worker, _ = self.worker("0.32.0")
        wrapper.compile_or_warm_up_model()
        said = self.phases(worker, fails=True)
        with self.assertRaises(MemoryError):
            wrapper.compile_or_warm_up_model()
        self.assertEqual((said, self.page(2)["phase"]), (["warm-up", "capture", "warm-up"], "idle"))

    def test_what_a_wake_up_calls_does_not_leave_its_phase_behind(self):
        def loads(modules):
            kind = modules["vllm.v1.worker.gpu_worker"].Worker

            def wake_up(self, tags=None):
                self.load_model()
                if tags:
                    raise RuntimeError("vLLM's own")
            kind.wake_up = wake_up
        _, (_, _, _, gpu) = fake.load("0.32.0", self.dir, loads)
        worker = gpu.Worker(fake.config(2), 0, 1)
        worker.compile_or_warm_up_model()
        for tags in (None, ["weights"]):
            worker.sleep()
            try:
                worker.wake_up(tags)
            except RuntimeError:
                pass
            self.assertEqual(self.page(2)["phase"], "idle")

    def test_a_base_s_method_that_is_called_says_nothing_anew(self):
        _, (_, _, _, gpu) = fake.load("0.32.0", self.dir)

        class Derived(gpu.Worker):
            def load_model(self):
                before = look(page)
                super().load_model()
                self.same = before == look(page)
        page = os.path.join(self.dir, "rank-2.beat")
        worker = Derived(fake.config(2), 0, 1)
        worker.load_model()
        self.assertTrue(worker.same)

    def test_missing_hooks_of_a_worker_are_told(self):
        names = ["load_model", "determine_available_memory", "sample_tokens", "sleep", "wake_up"]
        for name in names:
            with self.subTest(name=name):
                self.told.clear()
                self.renamed("vllm.v1.worker.gpu_worker", "Worker", name)
                self.assertEqual(self.missing(), ["Worker." + name])
                self.assertEqual(self.pages(), ["rank-2.beat"])
        self.told.clear()
        self.renamed("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "capture_model")
        self.assertEqual(self.missing(), ["GPUModelRunner.capture_model"])

    def renamed(self, module, cls, name):
        def rename(modules):
            owner = getattr(importlib.import_module(module), cls)
            owner.other = vars(owner)[name]
            delattr(owner, name)
        _, (_, _, _, gpu) = fake.load("0.32.0", self.dir, rename)
        gpu.Worker(fake.config(2), 0, 1)

    def missing(self):
        return [line.split(": ")[2].split(" (")[0] for line in self.told if "hook missing" in line]

    def test_a_version_without_steps_that_can_be_hooked_is_told(self):
        _, (_, _, base, _) = fake.load("0.8.5", self.dir)
        sys.modules["truebeat_heartbeat.vllm_worker"]._HOOKS["execute"] = None
        importlib.import_module("npu").NPUWorker(fake.config(2), 0, 1)
        self.assertEqual(self.missing(), ["execute_model of worker or runner"])

    def test_a_module_that_no_version_has_any_more_is_told(self):
        for of, name in (("vllm_core", "EXECUTOR"), ("vllm_core", "CORE"), ("vllm_worker", "BASE")):
            with self.subTest(name=name):
                self.told.clear()

                def gone(modules, of=of, name=name):
                    setattr(importlib.import_module("truebeat_heartbeat." + of), name, "vllm.gone")
                _, (executor, _, _, _) = fake.load("0.32.0", self.dir, gone)
                executor.MultiprocExecutor(fake.config())
                self.assertEqual((self.missing(), self.pages()), (["module vllm.gone"], ["rank-0.beat"] if name == "BASE" else []))

    def test_of_a_version_as_it_is_no_hook_is_missing(self):
        for version in fake.VERSIONS:
            with self.subTest(version=version):
                _, (executor, core, _, gpu) = fake.load(version, self.dir)
                gpu.Worker(fake.config(2), 0, 1)
                core.EngineCoreProc(fake.config())
                self.assertEqual(self.missing(), [])

    def test_a_rank_that_has_nothing_to_answer_ends_its_step_where_nothing_samples(self):
        # before 0.12 all ranks but one; pooling, in a stage of a pipeline that is not the last
        for version, runner in (("0.10.1", "generate"), ("0.32.0", "pooling")):
            with self.subTest(version=version, runner=runner):
                config = fake.config(2)
                config.model_config = SimpleNamespace(runner_type=runner)
                wrapper, worker, core = self.worker(version, config=config)
                wrapper.compile_or_warm_up_model()
                worker.execute_model = lambda output: None
                scheduler = core.Scheduler()
                scheduler.waiting += [core.Request("a", 1, 2)]
                for _ in range(2):
                    self.assertIsNone(wrapper.execute_model(scheduler.schedule()))
                seen = self.page(2)
                self.assertEqual((seen["phase"], seen["steps_completed"], seen["step_started_ns"]), ("idle", 2, 0))

    def test_a_worker_of_another_platform_has_the_phases_of_its_own_class(self):
        for version in fake.VERSIONS[1:]:  # before 0.10 no step of such a worker can be hooked
            for name in ("NPUWorker", "OtherNPUWorker"):
                with self.subTest(version=version, name=name):
                    _, (_, core, base, _) = fake.load(version, self.dir)
                    worker = getattr(importlib.import_module("npu"), name)(fake.config(2), 0, 1)
                    wrapper = base.WorkerWrapperBase(worker)
                    self.assertEqual(self.page(2)["phase"], "load")
                    wrapper.determine_available_memory()
                    self.assertEqual(self.page(2)["phase"], "compile")
                    wrapper.compile_or_warm_up_model()
                    self.assertEqual(self.page(2)["phase"], "idle")
                    scheduler = core.Scheduler()
                    scheduler.waiting += [core.Request("a", 700, 3)]
                    for _ in range(2):
                        if wrapper.execute_model(scheduler.schedule()) is None:
                            self.assertGreater(self.page(2)["step_started_ns"], 0, "sampling is a part of the step")
                            wrapper.sample_tokens(None)
                    seen = self.page(2)
                    self.assertEqual((seen["phase"], seen["steps_completed"], seen["step_started_ns"]), ("idle", 2, 0))
                    wrapper.sleep()
                    self.assertEqual(self.page(2)["phase"], "sleep")

    def test_a_worker_whose_start_has_no_end_that_can_be_seen_has_no_page(self):
        _, (_, _, base, _) = fake.load("0.32.0", self.dir)
        worker = importlib.import_module("npu").Renamed(fake.config(2), 0, 1)
        base.WorkerWrapperBase(worker).warm_up()
        self.assertEqual(self.pages(), [])
        self.assertTrue(any("hook missing: Renamed.compile_or_warm_up_model" in line for line in self.told))

    def test_one_process_for_core_and_worker_has_one_page(self):
        for name in ("UniProcExecutor", "OneProcess"):
            with self.subTest(name=name):
                _, (executor, core, _, gpu) = fake.load("0.32.0", self.dir)
                kind = executor.UniProcExecutor
                core.EngineCoreProc(fake.config(), kind if kind.__name__ == name else type(name, (kind,), {}))
                gpu.Worker(fake.config(), 0, 0)
                self.assertEqual(self.pages(), ["rank-0.beat"])
                self.assertEqual(self.page()["world_size"], 1)

    def test_a_worker_beside_a_core_without_a_page_does_not_take_another_engine_s(self):
        def rename(modules):
            core = modules["vllm.v1.engine.core"].EngineCoreProc
            core.other = core.run_busy_loop
            del core.run_busy_loop
        _, (executor, core, _, gpu) = fake.load("0.32.0", self.dir, rename)
        config = fake.config(engines=2)
        core.EngineCoreProc(config, executor.UniProcExecutor)
        gpu.Worker(config, 0, 0)
        self.assertEqual(self.pages(), [])  # rank 1 is the second engine's core


if __name__ == "__main__":
    unittest.main()
