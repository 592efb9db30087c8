//! From graphs to kernels, a device's family at a time. What kernels of an archetype are built around and what they take along
//! stands in `archetype`; what their texts share in `kernel_ir`; the folders beside them hold a backend each.

pub mod archetype;
pub mod cpu;
pub mod cuda;
pub mod kernel_ir;
