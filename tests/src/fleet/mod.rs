//! A fleet without machines on a real control plane: nodes that are objects alone ([`nodes`]), pods for which this crate writes what
//! kubelet and agent would ([`replica`]), tokens as pods have them ([`identity`]), and the real operator as a process ([`operator`]).
//!
//! What is real: API server, admission, RBAC, controllers, scheduler, operator. What is not: engines, agents, probes, containers.

pub mod identity;
pub mod nodes;
pub mod operator;
pub mod replica;
