//! Graphs of NVIDIA's driver: a node for each launch, one behind the other.
#![allow(unsafe_code, reason = "a foreign library has no safe form; each block argues for itself")]

use std::ptr;

use cudarc::driver::sys;

use super::{Nvidia, check, pointers};
use crate::backend::cuda::driver::{DriverError, Launch};

/// `CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC`.
const PORT_PROGRAMMATIC: u8 = 1;

/// A graph, ready to be launched.
pub struct Graph(pub(super) sys::CUgraphExec);

// SAFETY: as of `Nvidia`.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the handle came from an instantiation and is dropped once; the driver frees it when its last launch is done.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

impl Nvidia {
    /// A node for each launch, one behind the other, made ready.
    pub(super) fn fill(&self, graph: sys::CUgraph, launches: &[Launch]) -> Result<Graph, DriverError> {
        let mut before: sys::CUgraphNode = ptr::null_mut();
        for launch in launches {
            let (func, [x, y, z], mut args) = (self.function(launch)?, launch.grid(), pointers(launch));
            let params = sys::CUDA_KERNEL_NODE_PARAMS {
                func,
                gridDimX: x,
                gridDimY: y,
                gridDimZ: z,
                blockDimX: launch.block(),
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: launch.shared_bytes(),
                kernelParams: args.as_mut_ptr(),
                extra: ptr::null_mut(),
                kern: ptr::null_mut(),
                ctx: ptr::null_mut(),
            };
            let mut node = ptr::null_mut();
            // SAFETY: as of `launch`; the driver copies the arguments.
            let added =
                unsafe { sys::cuGraphAddKernelNode_v2(&raw mut node, graph, ptr::null(), 0, &raw const params) };
            check("cuGraphAddKernelNode", added)?;
            if !before.is_null() {
                self.depend(graph, before, node)?;
            }
            before = node;
        }
        let mut ready = ptr::null_mut();
        // SAFETY: the graph is whole; the answer's place outlives the call.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut ready, graph, 0) };
        check("cuGraphInstantiate", made)?;
        Ok(Graph(ready))
    }

    /// `node` comes behind `before`; where the device can, its blocks are placed before that one has ended, and wait for it themselves.
    fn depend(&self, graph: sys::CUgraph, before: sys::CUgraphNode, node: sys::CUgraphNode) -> Result<(), DriverError> {
        if !self.overlaps {
            // SAFETY: both are nodes of this graph.
            let added = unsafe { sys::cuGraphAddDependencies(graph, &raw const before, &raw const node, 1) };
            return check("cuGraphAddDependencies", added);
        }
        let edge = sys::CUgraphEdgeData {
            from_port: PORT_PROGRAMMATIC,
            to_port: 0,
            type_: sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8,
            reserved: [0; 5],
        };
        // SAFETY: both are nodes of this graph; every kernel waits by itself for the one before it, which a test of `image` holds.
        let added =
            unsafe { sys::cuGraphAddDependencies_v2(graph, &raw const before, &raw const node, &raw const edge, 1) };
        check("cuGraphAddDependencies", added)
    }
}
