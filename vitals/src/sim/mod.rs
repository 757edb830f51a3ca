//! A fleet in virtual time that drives the real detector: every documented hang, every healthy look-alike, the noise of real
//! machines, and mutations of them (goals 1d and 1e).
//!
//! Pure: no I/O, no clock, one seed. A [`history::Spec`] names one replica's life; [`history::run`] lives it: the engine makes
//! steps ([`engine`]), clients come and leave ([`clients`]), the host disturbs ([`world`]), an agent looks as late and as badly as
//! real ones do ([`agent`], [`shows`]), and the [`check`]er, who knows the truth, holds each outcome against it.

pub mod act;
pub mod agent;
pub mod book;
pub mod bounds;
pub mod bystanders;
pub mod chance;
pub mod check;
pub mod clients;
pub mod counters;
pub mod engine;
pub mod fault;
pub mod fences;
pub mod history;
pub mod kinds;
pub mod live;
mod mixture;
mod outputs;
mod pace;
pub mod pod;
pub mod profile;
pub mod queue;
pub mod script;
pub mod shows;
pub mod step;
pub mod table;
pub mod waits;
pub mod world;
