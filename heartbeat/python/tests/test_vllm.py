"""The plugin against fakes with the shapes of five versions of vLLM: what the core's page says, and that vLLM never notices."""
import logging
import os
import sys
import types
import unittest
import unittest.mock

import fake
from look import records
from plugged import Plugged


class CoreTest(Plugged):
    def engine(self, version, **how):
        _, (_, core, _, _) = fake.load(version, self.dir, how.pop("before", None), how.pop("register_first", True))
        engine = core.EngineCoreProc(how.pop("config", fake.config()), **how)
        getattr(engine, "run_busy_loop", lambda: None)()
        return engine, core

    def test_a_request_s_way_in_every_version(self):
        for version in fake.VERSIONS:
            for batch_queue in (False, True):
                for register_first in (False, True):
                    with self.subTest(version=version, batch_queue=batch_queue, register_first=register_first):
                        self.one_way(*self.engine(version, batch_queue=batch_queue, register_first=register_first), batch_queue)
                        self.assertEqual([line for line in self.told if "withdrawn" in line], [])

    def one_way(self, engine, core, batch_queue):
        seen = self.page()
        self.assertEqual((seen["phase"], seen["world_size"], seen["step_started_ns"]), ("idle", 2, 0))
        engine.add_request(core.Request("a", 700, 3))
        engine.add_request(core.Request("b", 1, 2))
        during = []
        engine.scheduler.update_from_output = self.spied(engine.scheduler.update_from_output, during)
        steps = 0
        while engine.scheduler.requests or (batch_queue and engine.batch_queue.count()):
            engine._process_engine_step()
            steps += 1
        batches = steps // 2 if batch_queue else steps
        first = during[0]
        # 512 of the first prompt and the whole of the second; 701 are owed until the step has ended
        self.assertEqual((first["phase"], first["phase_tokens"], first["prompt_tokens_owed"]), ("prefill", 513, 701))
        self.assertEqual((first["running"], first["waiting"]), (2, 0))
        self.assertGreater(first["step_started_ns"], 0)
        self.assertEqual(first["lease_ms"], 120_000 + 5_130)
        self.assertEqual((during[1]["phase_tokens"], during[1]["prompt_tokens_owed"]), (188, 188))
        self.assertEqual((during[2]["phase"], during[2]["phase_tokens"], during[2]["lease_ms"]), ("decode", 0, 120_000))
        last = self.page()
        self.assertEqual((last["steps_completed"], last["tokens_delivered"], last["requests_finished"]), (batches, 5, 2))
        self.assertEqual((last["phase"], last["running"], last["waiting"], last["prompt_tokens_owed"]), ("idle", 0, 0, 0))
        self.assertEqual(last["step_started_ns"], 0)
        lines = records(os.path.join(self.dir, "rank-0.beat"))
        self.assertEqual([(line["prefill_tokens"], line["decode_tokens"]) for line in lines][:3], [(513, 0), (188, 1), (0, 1)])

    def spied(self, original, during):
        def spy(*args):
            during.append(self.page())
            return original(*args)
        return spy

    def test_a_sleep_before_the_first_request_leaves_the_steps_as_they_are(self):
        for version in fake.VERSIONS:
            for batch_queue in (False, True):
                with self.subTest(version=version, batch_queue=batch_queue):
                    engine, core = self.engine(version, batch_queue=batch_queue)
                    engine.sleep()
                    self.assertEqual(self.page()["phase"], "sleep")
                    engine.wake_up()
                    self.one_way(engine, core, batch_queue)

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

    def test_aborts_and_sleep(self):
        engine, core = self.engine("0.18.0")
        engine.add_request(core.Request("a", 2000, 3))
        engine._process_engine_step()
        self.assertEqual(self.page()["prompt_tokens_owed"], 2000 - 512)
        engine.abort_requests(["a"])
        engine.pause_scheduler()
        self.assertEqual(self.page()["phase"], "sleep")
        engine.resume_scheduler()
        seen = self.page()
        self.assertEqual((seen["phase"], seen["prompt_tokens_owed"], seen["running"]), ("idle", 0, 0))
        engine.sleep()
        self.assertEqual(self.page()["phase"], "sleep")
        engine.wake_up()
        self.assertEqual(self.page()["phase"], "idle")

    def test_what_the_core_ends_by_itself_owes_nothing(self):
        def before(modules):
            original = modules["vllm.v1.engine.core"].EngineCore.add_request

            def add_request(core, request, *args):
                original(core, request, *args)
                if getattr(request, "abort_immediately", False):
                    core.abort_requests([request.request_id])
            modules["vllm.v1.engine.core"].EngineCore.add_request = add_request

        for ends in ("as it comes", "in the scheduler"):
            with self.subTest(ends=ends):
                engine, core = self.engine(fake.VERSIONS[-1], before=before)
                engine.add_request(core.Request("live", 4, 10**6))
                engine._process_engine_step()
                for number in range(20):
                    request = core.Request(f"r{number}", 8000, 2)
                    request.abort_immediately = ends == "as it comes"
                    engine.add_request(request)
                    if ends == "in the scheduler":
                        engine.scheduler.finish(request.request_id)
                    engine._process_engine_step()
                seen = self.page()
                self.assertEqual((seen["running"], seen["waiting"], seen["prompt_tokens_owed"]), (1, 0, 0))

    def test_a_step_of_decode_changes_no_more_than_its_start(self):
        engine, core = self.engine("0.32.0")
        engine.add_request(core.Request("a", 4, 9))
        for _ in range(3):
            engine._process_engine_step()
        before, during = self.page(), []
        engine.scheduler.update_from_output = self.spied(engine.scheduler.update_from_output, during)
        engine._process_engine_step()
        started = during[0]["step_started_ns"]
        self.assertGreater(started, before["published_ns"])
        self.assertEqual(during[0], {**before, "seq": before["seq"] + 2, "step_started_ns": started, "published_ns": started})

    def test_the_short_way_of_a_step_of_decode_says_what_the_long_one_does(self):
        seen = []
        for short in (True, False):
            engine, core = self.engine("0.32.0")
            engine.add_request(core.Request("long", 4, 9))
            engine.add_request(core.Request("short", 4, 5))
            beat = sys.modules["truebeat_heartbeat.vllm_core"]._beat
            seen.append([])
            for step in range(7):
                if step == 5:  # one has just left, and another comes: as many run as before
                    engine.add_request(core.Request("late", 1, 9))
                if not short:
                    beat.decoding = -1
                engine._process_engine_step()
                times = ("published_ns", "phase_entered_ns", "pid_start_ticks")
                seen[-1].append({name: value for name, value in self.page().items() if name not in times})
            lines = records(os.path.join(self.dir, "rank-0.beat"))
            seen[-1] += [{name: value for name, value in line.items() if not name.endswith("_ns")} for line in lines]
        self.assertEqual(seen[0], seen[1])
        self.assertEqual((seen[0][6]["tokens_delivered"], seen[0][6]["requests_finished"]), (14, 1))

    def test_the_last_batch_to_come_back_ends_the_decode_although_nothing_has_run_for_a_while(self):
        engine, core = self.engine("0.32.0", batch_queue=True)
        engine.add_request(core.Request("a", 1, 10**6))
        while self.page()["phase"] != "decode":
            engine._process_engine_step()
        for _ in range(2):  # handed out, and ended by its client before they come back
            engine.model_executor.execute_model(engine.scheduler.schedule())
            engine.batch_queue.add(engine.scheduler.schedule())
        engine.abort_requests(["a"])
        engine.scheduler.schedule = lambda: None
        seen = []
        while engine.batch_queue.count():
            engine._process_engine_step()
            seen.append((self.page()["phase"], self.page()["running"]))
        self.assertEqual((seen[0], seen[-1]), (("decode", 0), ("idle", 0)))

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

    def test_one_prompt_that_leaves_as_another_comes_is_on_the_page_when_the_next_step_begins(self):
        engine, core = self.engine("0.32.0")
        engine.add_request(core.Request("a", 4, 9))
        for _ in range(3):
            engine._process_engine_step()
        engine.scheduler.paused = "new"  # who comes waits
        owed = []
        for number, prompt in enumerate((70, 300)):
            engine.abort_requests(list(engine.scheduler.requests)[1:])
            engine.add_request(core.Request("b%d" % number, prompt, 2))
            during = []
            engine.scheduler.update_from_output = self.spied(core.Scheduler.update_from_output.__get__(engine.scheduler), during)
            engine.scheduler.schedule = self.decodes_the_first(engine.scheduler)
            engine._process_engine_step()
            owed.append((during[0]["running"], during[0]["waiting"], during[0]["prompt_tokens_owed"]))
        self.assertEqual(owed, [(1, 1, 70), (1, 1, 300)])

    def decodes_the_first(self, scheduler):
        counts = {scheduler.running[0].request_id: 1}
        return lambda: types.SimpleNamespace(num_scheduled_tokens=counts, total_num_scheduled_tokens=1, scheduled_spec_decode_tokens={})

    def test_tokens_are_counted_one_by_one_where_a_batch_may_bring_several(self):
        for drafted, brought in (({}, 1), ({"a": [5, 6]}, 3)):
            engine, core = self.engine("0.32.0")
            engine.add_request(core.Request("a", 4, 99))
            for _ in range(3):
                engine._process_engine_step()
            before = self.page()["tokens_delivered"]
            tokens = 1 + sum(map(len, drafted.values()))
            engine.scheduler.schedule = lambda: types.SimpleNamespace(
                num_scheduled_tokens={"a": tokens}, total_num_scheduled_tokens=tokens, scheduled_spec_decode_tokens=drafted)
            engine.scheduler.update_from_output = lambda output: [types.SimpleNamespace(new_token_ids=[7] * brought)]
            engine._process_engine_step()
            self.assertEqual(self.page()["tokens_delivered"] - before, brought)

    def test_of_two_batches_under_way_the_older_one_is_what_comes_back(self):
        engine, core = self.engine("0.32.0", batch_queue=True)
        engine.add_request(core.Request("a", 4, 99))
        engine._process_engine_step()
        beat = sys.modules["truebeat_heartbeat.vllm_core"]._beat
        outputs = types.SimpleNamespace(outputs=[types.SimpleNamespace(new_token_ids=[7, 8])])
        decodes, drafts = (1, 0, 1, 1, None), (1, 0, 3, 1, ())
        for flight, tokens in (((decodes, drafts), 1), ((drafts, decodes), 2)):
            beat.flight.clear()
            beat.flight.extend(flight)
            before = beat.tokens
            beat.counts(({0: outputs}, True))
            self.assertEqual(beat.tokens - before, tokens)

    def test_an_answer_without_tokens_is_one(self):
        engine, core = self.engine("0.32.0")
        beat = sys.modules["truebeat_heartbeat.vllm_core"]._beat
        pooled = [types.SimpleNamespace(new_token_ids=[], pooling_output=0.5), types.SimpleNamespace(new_token_ids=[], pooling_output=None)]
        beat.counts(({0: types.SimpleNamespace(outputs=pooled)}, True))
        self.assertEqual(beat.tokens, 1)

    def test_of_chunks_under_way_the_page_tells_the_next_one_and_its_lease_covers_all(self):
        engine, core = self.engine("0.32.0", batch_queue=True)
        engine.add_request(core.Request("a", 4096, 1))
        engine._process_engine_step()
        beat = sys.modules["truebeat_heartbeat.vllm_core"]._beat
        for tokens in (256, 512):
            beat.launches(engine, types.SimpleNamespace(
                num_scheduled_tokens={"a": tokens}, total_num_scheduled_tokens=tokens, scheduled_spec_decode_tokens={}))
        page = self.page()
        self.assertEqual((page["phase_tokens"], page["lease_ms"]), (512, 120_000 + 12_800))

    def test_a_call_that_is_no_request_is_on_the_page_while_it_lasts(self):
        UTILITY, ADD = types.SimpleNamespace(name="UTILITY"), types.SimpleNamespace(name="ADD")
        for version in fake.VERSIONS:
            with self.subTest(version=version):
                engine, core = self.engine(version)
                during = []
                engine._handle_client_request(UTILITY, ("add_lora", (lambda: during.append(self.page()),)))
                self.assertEqual((during[0]["phase"], during[0]["lease_ms"]), ("load", 900_000))
                self.assertEqual((self.page()["phase"], self.page()["step_started_ns"]), ("idle", 0))
                engine._handle_client_request(ADD, core.Request("a", 4, 99))
                for _ in range(3):
                    engine._process_engine_step()
                before = self.page()

                def fails():
                    during.append(self.page())
                    raise KeyError("no such adapter")
                self.assertRaises(KeyError, engine._handle_client_request, UTILITY, ("add_lora", (fails,)))
                self.assertEqual((during[1]["phase"], during[1]["running"]), ("load", 1))
                self.assertGreater(during[1]["step_started_ns"], 0)
                after = self.page()
                same = ("phase", "running", "waiting", "lease_ms", "step_started_ns", "steps_completed")
                self.assertEqual([after[name] for name in same], [before[name] for name in same])

    def test_an_error_s_output_is_no_token(self):
        engine, core = self.engine("0.32.0")
        engine.add_request(core.Request("a", 4, 99))
        for _ in range(3):
            engine._process_engine_step()
        before = self.page()["tokens_delivered"]
        engine.scheduler.schedule = lambda: types.SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0,
                                                                  scheduled_spec_decode_tokens={})
        engine.scheduler.update_from_output = lambda output: [types.SimpleNamespace(new_token_ids=[])]
        engine._process_engine_step()
        self.assertEqual(self.page()["tokens_delivered"], before)

    def test_a_session_that_waits_for_its_client_is_no_work(self):
        engine, core = self.engine("0.32.0")
        session = core.Request("a", 10, 3)
        engine.add_request(session)
        engine._process_engine_step()

        def parked(output):
            engine.scheduler.running.remove(session)
            engine.scheduler.kv_holding_waiting.append(session)
            engine.scheduler.num_waiting_for_streaming_input += 1
            return []
        engine.scheduler.update_from_output = parked
        engine._process_engine_step()
        for _ in range(2):
            seen = self.page()
            self.assertEqual((seen["phase"], seen["running"], seen["waiting"], seen["requests_finished"]), ("idle", 0, 0, 0))
            engine.pause_scheduler()
            engine.resume_scheduler()

    def test_a_pause_that_keeps_its_requests_sleeps_once_the_last_batch_is_back(self):
        engine, core = self.engine("0.32.0", batch_queue=True)
        engine.add_request(core.Request("a", 10, 3))
        engine._process_engine_step()
        engine.pause_scheduler(mode="keep")
        engine._process_engine_step()  # the batch that was with the workers; the loop then blocks until it is resumed
        self.assertEqual(list(engine.batch_queue), [])
        seen = self.page()
        self.assertEqual((seen["phase"], seen["running"], seen["step_started_ns"]), ("sleep", 1, 0))
        engine.resume_scheduler()
        for _ in range(4):
            engine._process_engine_step()
        self.assertEqual((self.page()["phase"], self.page()["requests_finished"]), ("idle", 1))

    def test_a_pause_that_waits_for_its_requests_is_none_before_they_are_done(self):
        engine, core = self.engine("0.32.0")
        engine.add_request(core.Request("a", 10, 3))
        engine._process_engine_step()
        engine.pause_scheduler(mode="wait")
        engine.add_request(core.Request("b", 10, 3))
        for expected in (("decode", 1, 1), ("sleep", 0, 1)):
            engine._process_engine_step()
            seen = self.page()
            self.assertEqual((seen["phase"], seen["running"], seen["waiting"]), expected)

    def test_a_pause_that_fails_half_way_is_one_all_the_same(self):
        def fails(modules):
            core = modules["vllm.v1.engine.core"].EngineCoreProc
            pauses = core.pause_scheduler

            def pause_scheduler(self, mode="abort"):
                pauses(self, mode)
                raise RuntimeError("vLLM's own")
            core.pause_scheduler = pause_scheduler
        engine, _ = self.engine("0.32.0", before=fails)
        with self.assertRaisesRegex(RuntimeError, "vLLM's own"):
            engine.pause_scheduler()
        self.assertEqual(self.page()["phase"], "sleep")

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
